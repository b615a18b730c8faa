// What a step costs beyond its kernels, by what makes it follow the one before: a replay that the host has queued, a WHILE
// or an IF node around the step, or a dispatcher that launches the step's graph from the device. Prints "name value" lines.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const cudaError_t status = (call);                                                   \
    if (status != cudaSuccess) {                                                         \
      std::printf("failed %s: %s\n", #call, cudaGetErrorString(status));                 \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

constexpr int STEPS = 60;  // of one launch of a loop or a dispatcher
constexpr int ROUNDS = 15;

struct Count {
  unsigned long long done, limit;
};

__device__ unsigned long long clock_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// One kernel of a step: starts early behind the one before (programmatic launch), then works for a while.
__global__ void work(unsigned long long nanoseconds) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const unsigned long long entered = clock_ns();
  while (clock_ns() - entered < 1000) {}  // what does not depend on the kernel before: loads of weights
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const unsigned long long start = clock_ns();
  while (clock_ns() - start < nanoseconds) {}
}

__global__ void advance_loop(Count* count, cudaGraphConditionalHandle again) {
  const unsigned long long done = ++count->done;
  cudaGraphSetConditional(again, done < count->limit);
}

__global__ void advance_plain(Count* count) { ++count->done; }

__global__ void test_step(Count* count, cudaGraphConditionalHandle runs) {
  const bool has_more = count->done < count->limit;
  cudaGraphSetConditional(runs, has_more);
  if (has_more) ++count->done;
}

__global__ void dispatch(cudaGraphExec_t step, Count* count, int* error) {
  if (count->done >= count->limit) return;
  ++count->done;
  __threadfence();
  cudaError_t status = cudaGraphLaunch(step, cudaStreamGraphTailLaunch);
  if (status == cudaSuccess) status = cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
  if (status != cudaSuccess) *error = static_cast<int>(status);
}

struct Step {
  int kernels;
  unsigned long long nanoseconds;
  bool overlaps;

  void enqueue(cudaStream_t stream) const {
    for (int i = 0; i < kernels; ++i) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = 132, config.blockDim = 256, config.stream = stream;
      config.attrs = &attribute, config.numAttrs = overlaps && i > 0 ? 1 : 0;
      CHECK(cudaLaunchKernelEx(&config, work, nanoseconds));
    }
  }
};

static cudaGraph_t captured(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

static cudaGraph_t conditional(cudaGraph_t parent, cudaGraphConditionalHandle handle, cudaGraphConditionalNodeType type,
                               const cudaGraphNode_t* after) {
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle;
  params.conditional.type = type;
  params.conditional.size = 1;
  cudaGraphNode_t node;
  CHECK(cudaGraphAddNode(&node, parent, after, nullptr, after ? 1 : 0, &params));
  return params.conditional.phGraph_out[0];
}

static double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Microseconds from the first kernel to the last, of what `enqueue` puts on the stream.
static double device_us(cudaStream_t stream, Count* count, const std::function<void()>& enqueue, double* host_us = nullptr) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<double> spans, hosts;
  for (int round = 0; round < ROUNDS; ++round) {
    const Count start{0, STEPS};
    CHECK(cudaMemcpyAsync(count, &start, sizeof start, cudaMemcpyHostToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventRecord(begin, stream));
    const auto from = std::chrono::steady_clock::now();
    enqueue();
    hosts.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count());
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    spans.push_back(milliseconds * 1e3);
    Count left;
    CHECK(cudaMemcpy(&left, count, sizeof left, cudaMemcpyDeviceToHost));
    if (left.done != STEPS) std::printf("failed steps: %llu of %d\n", left.done, STEPS), std::exit(1);
  }
  if (host_us) *host_us = median(hosts);
  return median(spans);
}

static void measure(const char* name, const Step& step) {
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Count* count;
  int* error;
  CHECK(cudaMalloc(&count, sizeof *count));
  CHECK(cudaMalloc(&error, sizeof *error));
  CHECK(cudaMemset(error, 0, sizeof *error));
  CHECK(cudaDeviceSynchronize());

  const cudaGraph_t plain = captured(stream, [&] {
    step.enqueue(stream);
    advance_plain<<<1, 32, 0, stream>>>(count);
  });
  const cudaGraph_t body = captured(stream, [&] { step.enqueue(stream); });

  // the same kernels, one after another, in one graph: no step costs anything
  cudaGraphExec_t whole, single, loop, guarded, dispatcher, child;
  const cudaGraph_t all = captured(stream, [&] {
    for (int i = 0; i < STEPS; ++i) {
      step.enqueue(stream);
      advance_plain<<<1, 32, 0, stream>>>(count);
    }
  });
  CHECK(cudaGraphInstantiate(&whole, all, 0));
  const double floor_us = device_us(stream, count, [&] { CHECK(cudaGraphLaunch(whole, stream)); });
  std::printf("one_graph_us.%s %.3f\n", name, floor_us / STEPS);

  double host_us;
  CHECK(cudaGraphInstantiate(&single, plain, 0));
  const double chain = device_us(stream, count, [&] {
    for (int i = 0; i < STEPS; ++i) CHECK(cudaGraphLaunch(single, stream));
  }, &host_us);
  std::printf("queued_replay_us.%s %.3f\n", name, (chain - floor_us) / STEPS);
  std::printf("queued_replay_host_us.%s %.3f\n", name, host_us / STEPS);

  for (const bool is_child : {true, false}) {
    cudaGraph_t graph;
    cudaGraphConditionalHandle again;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphConditionalHandleCreate(&again, graph, 1, cudaGraphCondAssignDefault));
    const cudaGraph_t inside = conditional(graph, again, cudaGraphCondTypeWhile, nullptr);
    if (is_child) {
      cudaGraphNode_t node;
      CHECK(cudaGraphAddChildGraphNode(&node, inside, nullptr, 0, body));
      CHECK(cudaStreamBeginCaptureToGraph(stream, inside, &node, nullptr, 1, cudaStreamCaptureModeThreadLocal));
    } else {
      CHECK(cudaStreamBeginCaptureToGraph(stream, inside, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal));
      step.enqueue(stream);
    }
    advance_loop<<<1, 1, 0, stream>>>(count, again);
    CHECK(cudaStreamEndCapture(stream, nullptr));
    const cudaError_t status = cudaGraphInstantiate(&loop, graph, 0);
    if (status != cudaSuccess) {
      std::printf("refused_%s.%s %d\n", is_child ? "while_child" : "while_captured", name, static_cast<int>(status));
      cudaGetLastError();
      continue;
    }
    const double span = device_us(stream, count, [&] { CHECK(cudaGraphLaunch(loop, stream)); }, &host_us);
    std::printf("%s_us.%s %.3f\n", is_child ? "while_child" : "while_captured", name, (span - floor_us) / STEPS);
    std::printf("%s_host_us.%s %.3f\n", is_child ? "while_child" : "while_captured", name, host_us / STEPS);
  }

  {
    cudaGraph_t graph;
    cudaGraphConditionalHandle runs;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphConditionalHandleCreate(&runs, graph, 0, cudaGraphCondAssignDefault));
    cudaGraphNode_t test;
    void* arguments[] = {&count, &runs};
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = reinterpret_cast<void*>(test_step);
    params.kernel.gridDim = dim3(1), params.kernel.blockDim = dim3(1);
    params.kernel.kernelParams = arguments;
    CHECK(cudaGraphAddNode(&test, graph, nullptr, nullptr, 0, &params));
    const cudaGraph_t inside = conditional(graph, runs, cudaGraphCondTypeIf, &test);
    cudaGraphNode_t node;
    CHECK(cudaGraphAddChildGraphNode(&node, inside, nullptr, 0, body));
    CHECK(cudaGraphInstantiate(&guarded, graph, 0));
    const double span = device_us(stream, count, [&] {
      for (int i = 0; i < STEPS; ++i) CHECK(cudaGraphLaunch(guarded, stream));
    }, &host_us);
    std::printf("queued_if_us.%s %.3f\n", name, (span - floor_us) / STEPS);
    const double skipped = device_us(stream, count, [&] {
      for (int i = 0; i < 3 * STEPS; ++i) CHECK(cudaGraphLaunch(guarded, stream));
    });
    std::printf("skipped_if_us.%s %.3f\n", name, (skipped - span) / (2 * STEPS));
  }

  CHECK(cudaGraphInstantiate(&child, body, cudaGraphInstantiateFlagDeviceLaunch));
  CHECK(cudaGraphUpload(child, stream));
  const cudaGraph_t graph = captured(stream, [&] { dispatch<<<1, 1, 0, stream>>>(child, count, error); });
  CHECK(cudaGraphInstantiate(&dispatcher, graph, cudaGraphInstantiateFlagDeviceLaunch));
  CHECK(cudaGraphUpload(dispatcher, stream));
  CHECK(cudaStreamSynchronize(stream));
  const double span = device_us(stream, count, [&] { CHECK(cudaGraphLaunch(dispatcher, stream)); }, &host_us);
  int code;
  CHECK(cudaMemcpy(&code, error, sizeof code, cudaMemcpyDeviceToHost));
  if (code) std::printf("failed dispatch: %s\n", cudaGetErrorString(static_cast<cudaError_t>(code))), std::exit(1);
  std::printf("dispatched_us.%s %.3f\n", name, (span - floor_us) / STEPS);
}

int main() {
  measure("1_kernel", Step{1, 2000, false});
  measure("9_kernels", Step{9, 4000, true});
  measure("9_kernels_in_order", Step{9, 4000, false});
  measure("200_kernels", Step{200, 4000, true});
  return 0;
}

"""Makes the CUDA workers of a rank: device, kernels, driver and the way its peers find its memory."""

from collections.abc import Mapping, Sequence

import torch

from crosspool.backends.base import AttentionWorker, FFNWorker
from crosspool.backends.cuda.channels.handoff import DescriptorServer
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.channels.nvshmem_team import Team
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import ask_for_queues
from crosspool.backends.cuda.device.sm_partition import SmPartition
from crosspool.backends.cuda.device.uploads import pin_ahead
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames, DeviceFrames, make_frames
from crosspool.backends.cuda.kv_frames.host_frames import make_host_frames
from crosspool.backends.cuda.kv_frames.shared_arena import SharedArena
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker
from crosspool.backends.cuda.prefill_rank.prefill_worker import CudaPrefillWorker
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker
from crosspool.cluster.checks import check_devices
from crosspool.pools_config import Control, KVBacking, Transport


def join_halves(attention: AttentionWorker, ffn: FFNWorker, kv_rank: str, weights_rank: str) -> None:
    """Let the two workers, which share a process and a GPU, run their models undivided."""
    assert isinstance(attention, CudaAttentionWorker)
    assert isinstance(ffn, CudaFFNWorker)
    attention.join(weights_rank, ffn)
    ffn.join(kv_rank)


class CudaWorkers:
    """What the workers of one rank are made of. Raises ValueError where its GPU, or a peer's, does not exist."""

    def __init__(
        self,
        rank: str,
        devices: Mapping[str, int],
        *,
        has_processes: bool,
        deadline_s: float,
        control: Control,
        order: str,
        goes_ahead: bool,
        transport: Transport,
        team: Team | None,
        run_lanes: int,
        prefill_share: float,
        first_prompt_lane: int,
    ) -> None:
        """goes_ahead: a lane's next decode step may be handed over while the present one runs (`BeginsAhead`).

        team: of ranks whose channels lie in NVSHMEM's memory; this returns once all have come. run_lanes: of
        `ClusterConfig`. prefill_share: of the multiprocessors, for prompts while decode runs beside them; the rest is
        always free for decode's kernels. first_prompt_lane: of `ClusterConfig`.
        """
        ask_for_queues()
        check_devices(devices, torch.cuda.device_count())
        index = devices[rank]
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        pin_ahead()
        self._kernels = DeviceKernels(device)
        driver = Driver(rank)
        partition = SmPartition.create(driver, index, int(self._kernels.num_sms * prefill_share))
        server = DescriptorServer() if has_processes else None
        heap = team.join(rank) if team is not None else None
        self._site = Site(rank, device, driver, devices, server, partition, transport, heap, first_prompt_lane)
        self._rule = WaitRule(deadline_s=deadline_s)
        self._control, self._order, self._goes_ahead = control, order, goes_ahead
        self._run_lanes = run_lanes

    def attention(
        self,
        num_frames: int,
        frame_bytes: int,
        backing: KVBacking = "arena",
        first_frame: int | None = None,
        sharing: tuple[str, ...] = (),
        token: str = "",
        kv_ranks: Sequence[str] = (),
        num_host_frames: int = 0,
    ) -> tuple[CudaAttentionWorker, DeviceFrames | None]:
        """The worker, and its frames where they are mapped ahead of need.

        sharing: the KV ranks, this one among them, that share one arena under `token`; none: it has its own. kv_ranks:
        all of the deployment, in their order. num_host_frames: of host memory beside an arena of its own.
        """
        site, shape = self._site, (num_frames, frame_bytes)
        shared = SharedArena(site.driver, site.device, shape, sharing, token) if sharing else None
        frames = make_frames(site, shape, backing, shared)
        host_frames = None
        if num_host_frames:
            assert isinstance(frames, ArenaFrames), "mapped frames have no host memory behind them"
            host_frames = make_host_frames(site, frames.arena, num_host_frames, first_frame or 0)
        worker = CudaAttentionWorker(
            site,
            self._kernels,
            self._rule,
            frames,
            first_frame=first_frame,
            kv_ranks=kv_ranks,
            is_host_driven=self._control == "host",
            goes_ahead=self._goes_ahead,
            host_frames=host_frames,
            run_lanes=self._run_lanes,
        )
        return worker, frames if isinstance(frames, DeviceFrames) else None

    def prefill(self, room_bytes: int) -> CudaPrefillWorker:
        """room_bytes: device memory for whole models that are in place at once."""
        return CudaPrefillWorker(self._site, self._kernels, self._rule, room_bytes)

    def ffn(self) -> CudaFFNWorker:
        return CudaFFNWorker(
            self._site,
            self._kernels,
            self._rule,
            control=self._control,
            order=self._order,
            goes_ahead=self._goes_ahead,
            run_lanes=self._run_lanes,
        )

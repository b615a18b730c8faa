"""How help is written: summaries of commands whole, and the options of `serve` and `bench` by what they are about."""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

GROUPS: Mapping[str, str] = {
    "Models": "config plan plan_group check served_model_name max_model_len chat_template dtype weights download_dir",
    "Server": "host port listen_fd api_key admin_api_key ssl_certfile ssl_keyfile allowed_origins root_path "
    "sse_keep_alive_interval shutdown_timeout",
    "Requests": "max_num_seqs max_num_batched_tokens max_queue max_queue_per_key queue_timeout admission "
    "enable_prefix_caching batch_invariant prefill_share decode_steps seed",
    "Memory": "kv_pool_bytes frame_bytes kv_backing host_pool_bytes",
    "Pools and ranks": "backend gpus weights_ranks weights_shares kv_ranks kv_split prefill prefill_ranks "
    "prefill_gpus prefill_pool_bytes layout transport control route order pipeline steps_ahead recovery_timeout "
    "baseline",
    "Logs and metrics": "log_level log_format disable_access_log_for_endpoints metrics_compat otlp_traces_endpoint",
}
"""Names of parameters, by heading, in the order in which they are shown. The others come last."""


BENCH_GROUPS: Mapping[str, str] = {
    "Server": "base_url endpoint api_key models timeout_s",
    "When requests come": "request_rate burstiness ramp ramp_start_rps ramp_end_rps max_concurrency "
    "num_prompts duration_s",
    "What they are": "input_len output_len lengths max_model_len ignore_eos temperature vocab_size tokenizer "
    "extra_body seed",
    "Recorded traces": "trace trace_format trace_model trace_names trace_speed start_s skips_unserved "
    "length_scale servegen_rates servegen_lengths servegen_clients",
    "Measuring": "num_warmups num_processes metrics percentiles goodput",
    "Results": "saves detailed reports result_dir result_filename label as_json",
}
"""The same of `crosspool bench`."""


def write_options(groups: Mapping[str, str], parameters: Mapping[str, Any], ctx: Any, formatter: Any) -> None:
    """A heading for each group; `ctx` and `formatter` are those of the library that Typer brings along."""
    grouped = {name for names in groups.values() for name in names.split()}
    others = " ".join(name for name in parameters if name not in grouped)
    for heading, names in {**groups, "Others": others}.items():
        records = [parameters[name].get_help_record(ctx) for name in names.split()]
        with formatter.section(heading):
            formatter.write_dl([record for record in records if record is not None], col_max=36)


class ServeCommand(TyperCommand):
    """Writes a heading for each group of options where other commands write one for all."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = {str(each.name): each for each in self.get_params(ctx) if each.name != "models"}
        write_options(GROUPS, parameters, ctx, formatter)


class Commands(TyperGroup):
    """Writes each command's summary whole, on as many lines as it takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(1000)) for name, each in commands if each is not None])


class BenchCommands(Commands):
    """As `ServeCommand`, of a command that has another below it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(BENCH_GROUPS, {str(each.name): each for each in self.get_params(ctx)}, ctx, formatter)
        self.format_commands(ctx, formatter)

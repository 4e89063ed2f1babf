"""The `quire` command: finds the subcommand and turns wrong settings into one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from quire import __version__
from shared.config import refuse_long_paths
from shared.errors import ConfigError, QuireError, shorten
from shared.paths import expand

Command = Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire ARGV`; the process' exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"quire {__version__}")
        return 0
    return run_command(_pick(COMMANDS, arguments[0], "command"), arguments[1:])


def run_command(command: Command, arguments: list[str]) -> int:
    """`command`'s exit code; an error of ours becomes one line on standard error."""
    try:
        with refuse_long_paths():
            return command(arguments)
    except ConfigError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 2
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def serve(arguments: list[str]) -> int:
    """Start a gateway, a scheduler, workers and a Redis on this machine, until Ctrl-C."""
    from quire import launcher

    return launcher.main(arguments)


def simulate(arguments: list[str]) -> int:
    """Run the scheduler's policy on made-up traffic and simulated workers, and show what comes of it."""
    from quire.simulate import command

    return command.main(arguments)


def quantize(arguments: list[str]) -> int:
    """Make a checkpoint with quantized weights from one of floats."""
    from quire import quantize as command

    return command.main(arguments)


def advise(arguments: list[str]) -> int:
    """Say what to set on a server that runs, by its own metrics, and what it should gain."""
    from quire.advise import command

    return command.main(arguments)


def bench(arguments: list[str]) -> int:
    """Measure a server (`serve`), this machine (`table`), the engine (`step`, `growth`), the services or a GPU."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("usage: quire bench COMMAND [options]\n")
        print("\n".join(f"  {name:8}{command.__doc__}" for name, command in BENCH_COMMANDS.items()))
        print("\n`quire bench COMMAND --help` shows its options.")
        return 0
    return _pick(BENCH_COMMANDS, name, "bench command")(arguments[1:])


def bench_table(arguments: list[str]) -> int:
    """Measure all of README's results table: limits of the machine, q05b and tiny, w1 to w4."""
    from quire.bench import table

    return table.main(arguments)


def bench_serve(arguments: list[str]) -> int:
    """Measure a running server."""
    from quire.bench import serve as measure

    return measure.main(arguments)


def bench_step(arguments: list[str]) -> int:
    """Time one engine's steps, by part with --profile; no services."""
    from quire.bench import step

    return step.main(arguments)


def bench_growth(arguments: list[str]) -> int:
    """Show how a step's cost grows with batch, context, cache size and queue; no services."""
    from quire.bench import growth

    return growth.main(arguments)


def bench_quality(arguments: list[str]) -> int:
    """Perplexity and agreement with each KV dtype, or any flags, beside the plain worker."""
    from quire.bench import quality

    return quality.main(arguments)


def bench_ablation(arguments: list[str]) -> int:
    """Show what each mechanism is worth here, by turning it off."""
    from quire.bench import ablation

    return ablation.main(arguments)


def bench_gpu(arguments: list[str]) -> int:
    """Time each kernel against what the card can do, and decode."""
    from quire.bench import gpu

    return gpu.main(arguments)


def bench_gateway(arguments: list[str]) -> int:
    """Measure what gateway, scheduler, worker loop and Redis cost beside the model; no server needed."""
    from quire.bench import gateway as measure

    return measure.main(arguments)


def bench_model(arguments: list[str]) -> int:
    """Make a model with random weights: q05b|tiny FOLDER."""
    from quire.bench.model_shapes import SHAPES
    from quire.bench.random_model import write_random_model

    usage = f"usage: quire bench model SHAPE FOLDER; shapes: {', '.join(SHAPES)}"
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage)
        return 0
    if len(arguments) != 2 or arguments[0] not in SHAPES:
        raise ConfigError(usage)
    shape, folder = arguments[0], expand("FOLDER", arguments[1])
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{shorten(folder)} is there already; give a new folder")
    print(f"{shape}: {write_random_model(shape, folder, report=print)}")
    return 0


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "advise": advise,
    "bench": bench,
    "simulate": simulate,
    "quantize": quantize,
}
BENCH_COMMANDS: dict[str, Command] = {
    "table": bench_table,
    "serve": bench_serve,
    "step": bench_step,
    "growth": bench_growth,
    "quality": bench_quality,
    "ablation": bench_ablation,
    "gateway": bench_gateway,
    "gpu": bench_gpu,
    "model": bench_model,
}


def _pick(commands: dict[str, Command], name: str, what: str) -> Command:
    """`commands[name]`, or a command that says which ones there are."""
    if name in commands:
        return commands[name]

    def refuse(_: list[str]) -> int:
        raise ConfigError(f"no {what} {shorten(name)!r}; there are: {', '.join(commands)}")

    return refuse


def _usage() -> str:
    lines = ["usage: quire COMMAND [options]", "", "commands:"]
    lines += [f"  {name:10}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`quire COMMAND --help` shows a command's options; `quire --version` the version."])

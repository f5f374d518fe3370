"""msvit sweep: a grid of runs."""

from pathlib import Path

import typer

from msvit_lab.cli.app import AS_JSON, app, console, errors, numbers, pairs, plain_errors, say, words
from msvit_lab.cli.recipes import DATA, RECIPE, SET, check_own_data, resumable
from msvit_lab.cli.tables import show_runs


@app.command()
@plain_errors
@resumable("the same command goes on from there")
def sweep(
    recipe: str = RECIPE,
    target: str = typer.Option("0.5,0.25,0.1", help="Targets, separated by commas."),
    gate_weight: str = typer.Option("1,4,20", help="Gate weights, separated by commas."),
    sizes: str | None = typer.Option(None, help="Input sizes of the runs with a gate; the recipe's own by default."),
    dense_sizes: str | None = typer.Option(None, help="Those of the dense baselines; by default four, and --sizes."),
    seeds: str = typer.Option("0", help="Seeds, separated by commas."),
    gates: str = typer.Option("", help="Gates that do not learn, such as disc,entropy."),
    shares: str = typer.Option("0.3", help="Their shares of fine cells, separated by commas."),
    reducers: str = typer.Option("", help="All of these again with reducers, such as evit-0.7,tome-r8."),
    from_dense: bool = typer.Option(False, "--from-dense", help="Runs with a gate start from their seed's dense run."),
    at_once: int = typer.Option(1, min=1, help="Runs at once: a GPU may have room for several. On Ray: per GPU."),
    on: str = typer.Option("local", help="local, or ray: on all machines of a Ray cluster (docs/many_machines.md)."),
    data: str | None = DATA,
    settings: list[str] = SET,
    out: Path | None = typer.Option(None, help="Folder of the runs; runs/RECIPE-sweep by default."),
    smoke: bool = typer.Option(False, "--smoke", help="Tiny versions: does it run at all?"),
    as_json: bool = AS_JSON,
) -> None:
    """Train the paper's grid of targets and weights beside dense baselines; finished runs are not done again.

    Ctrl-C, SIGTERM and SIGUSR1 end it after a checkpoint of each run, with exit code 75: the same command goes on.

    With --sizes the runs with a gate are there at every size; those of another size than the recipe's have it in their
    name, such as t0.5-w1-160px-s0. --from-dense and reducers take the dense run of the same size.

    In settings {seed} stands for a run's seed, as in --set model.weights=runs/dense-s{seed}.

    Example: msvit sweep scenes --target 0.3 --gate-weight 50 --dense-sizes 128 --gates disc --shares 0.4 --from-dense
    """
    from msvit_lab.auto_settings import random_teacher_error
    from msvit_lab.config import override
    from msvit_lab.recipes import recipe as find
    from msvit_lab.sweep import SweepProgress, check_folders, grid, run_jobs

    if on not in ("local", "ray"):
        raise ValueError(f"--on is {on}, but known are local and ray")
    if on == "ray":
        from msvit_lab import on_ray

        on_ray.check_installed()
        run_jobs = on_ray.run_jobs
    out = out or Path("runs") / f"{recipe}-sweep"
    changes = pairs(settings) | ({} if data is None else {"data.source": data})
    config = override(find(recipe, smoke=smoke), changes)
    if "data.source" not in changes:
        check_own_data(recipe, config)
    if not (smoke or from_dense) and (reason := random_teacher_error(config)):
        raise ValueError(reason)
    jobs = grid(
        recipe, targets=numbers(target), weights=numbers(gate_weight), seeds=numbers(seeds, int),
        sizes=None if dense_sizes is None else numbers(dense_sizes, int),
        gated_sizes=None if sizes is None else numbers(sizes, int), smoke=smoke,
        gates=words(gates), shares=numbers(shares), reducers=words(reducers), out=out, from_dense=from_dense,
        changes=changes,
    )  # fmt: skip
    check_folders(recipe, jobs, out, smoke=smoke)

    shown = errors if as_json else console
    progress = SweepProgress(jobs, out, shown)
    failed = run_jobs(recipe, jobs, out, progress, smoke=smoke, at_once=at_once)
    show_runs([out / job.name for job in jobs if job not in failed], as_json)
    if failed:
        names = ", ".join(job.name for job in failed)
        say(f"{len(failed)} of {len(jobs)} runs failed ({names}); see their log.txt, then run it again", shown)
        raise typer.Exit(1)

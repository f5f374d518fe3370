"""What came of runs, as tables for a terminal or as JSON."""

import json
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from msvit_lab.cli.app import console, say


def show_evaluation(run: Path, found: dict[str, Any], as_json: bool = False) -> None:
    """A table and, of a run, where it was written; or one line of JSON, without what is one number per cell."""
    from msvit.speed_report import wilson
    from msvit_lab.evaluation_files import METRICS, Evaluations
    from msvit_lab.viz.compare import FEW, NONE

    path = Evaluations(run).path(found["name"]) if "name" in found else None
    if as_json:
        shown = {key: value for key, value in found.items() if key not in ("mask_mean", "mask_var")}
        print(json.dumps(shown if path is None else shown | {"path": str(path)}))
        return
    tokens, gmacs, segments = found["tokens"], found["gmacs"], found["task"] == "segment"
    metric = METRICS[found["task"]]
    sizes = f"images, windows of {found['img_size']} px" if segments else f"images of {found['img_size']} px"
    table = Table(title=f"{run}, {found['num_images']} {sizes}", show_header=False)
    for name, key in metric.columns:
        table.add_row(name, NONE if found[key] is None else f"{found[key]:.2%}")
    if found[metric.key] is None:
        table.add_row("", "no pixel is labelled")
    elif not segments and (num := found["num_images"]) < FEW:
        low, high = wilson(found["top1"], num)
        table.add_row("95 % interval of top-1", f"{low:.1%} to {high:.1%}, as there are {num} images")
    if "dense_top1" in found:
        table.add_row("top-1 of the dense host", f"{found['dense_top1']:.2%}")
    if found["reducer"] is not None:
        table.add_row("reducer", found["reducer"])
    spread = f"{tokens['mean']:.1f} ± {tokens['std']:.1f} of {tokens['dense']}"
    end = "" if found["reducer"] is None else ", at the end"
    table.add_row(f"tokens a window{end}" if segments else f"tokens{end}", spread)
    what = "GMACs a window, gate and encoder" if segments else "GMACs"
    table.add_row(what, f"{gmacs['mean']:.4f} ± {gmacs['std']:.4f}, {gmacs['mean'] / gmacs['dense']:.0%} of dense")
    if found["fine_on_object"] is not None:
        on_object, on_ground = found["fine_on_object"], found["fine_on_ground"]
        table.add_row("fine cells", f"{on_object:.0%} of those on objects, {on_ground:.0%} of those on ground")
    for row in found.get("latency", []):
        what = row["what"]
        if segments:
            what += ", encoder" if what == "dense host" else ", gate and encoder"
        low, high = row["quartiles"]
        time = f"{row['ms_per_image']:.3f} ms per {metric.per} (quartiles {low:.3f} to {high:.3f})"
        speed = f"{row['images_per_second']:.0f} {metric.per}s/s on {row['device']}"
        faster = row.get("speed_up")
        speed += "" if faster is None else f", {faster:.2f}x the dense host's speed"
        table.add_row(f"{what}, batch {row['batch']}, {row['dtype']}", f"{time}, {speed}")
    console.print(table)
    if (reason := found.get("uncompiled")) is not None:
        say(f"evaluated uncompiled: {reason}")
    if path is not None:
        say(f"written to {path}")


def show_runs(folders: list[Path], as_json: bool = False) -> None:
    """What came of the runs of a sweep: one sentence and a table, or one line of JSON."""
    if not folders:
        return
    found = records(folders)
    if as_json:
        print(json.dumps(found))
        return
    console.print(run_table(found["runs"], found["timed_with"]))
    for sentence in found["results"]:
        say(sentence)


def records(folders: list[Path]) -> dict[str, Any]:
    """What came of some runs, in one sentence for each task, and each run in a few numbers."""
    from msvit_lab.runs import read_runs
    from msvit_lab.viz.compare import by_metric, common_setting, labels, record, result

    runs = read_runs(folders)
    names = labels(runs)
    groups = by_metric(runs).values()
    rows = [record(run, group, names[run]) for group in groups for run in group]
    return {"results": [result(group).sentence for group in groups], "timed_with": common_setting(runs), "runs": rows}


def run_table(rows: list[dict[str, Any]], timed_with: tuple[str, str] | None) -> Table:
    """A line for each run. Speed-ups are over the dense host that was timed beside the run."""
    from msvit_lab.evaluation_files import METRICS
    from msvit_lab.viz.compare import NONE, percent, share_words, short

    metric = METRICS[rows[0]["task"]]  # a sweep has one task
    speeds = [
        {row["batch"]: row["speed_up"] for row in found["speed_ups"] if (row["device"], row["dtype"]) == timed_with}
        for found in rows
    ]
    batches = sorted({batch for each in speeds for batch in each}, reverse=True)
    objects = any(found["fine_on_object"] is not None for found in rows)
    heads = [metric.name, "tokens", "GMACs", "of dense", *(f"speed-up at batch {batch}" for batch in batches)]
    heads += ["fine on object, ground"] if objects else []
    caption = f"speed-up over the dense host, timed beside each run: {', '.join(timed_with)}" if timed_with else None
    table = Table(Column("run", no_wrap=True), *heads, caption=caption, caption_justify="left")
    for found, own in zip(rows, speeds, strict=True):
        cells = [found["run"], percent(found[metric.key])]
        cells += [f"{short(found['tokens']['mean'])} of {short(found['tokens']['dense'])}", short(found["gmacs"])]
        cells += [share_words(found), *(f"{own[batch]:.2f}x" if batch in own else NONE for batch in batches)]
        shares = (percent(found[f"fine_on_{what}"], 0) for what in ("object", "ground"))
        table.add_row(*cells, *([", ".join(shares)] if objects else []))
    return table

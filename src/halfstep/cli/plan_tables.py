"""The output of ``halfstep plan``: a table of parts, one of messages, and sentences about work, card and fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfstep.cli.plan_options import OF_A_PLAN
from halfstep.cli.terminal import Table, text
from halfstep.numerics.planning.sharding import BUSES

_PHASES = {"always": "always", "backward": "fwd, bwd", "step": "step"}


def digits(value: float) -> str:
    """A number with at least three digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def size(value: int) -> str:
    """Bytes in the largest binary unit in which the number is at least 1, with three digits or more."""
    unit, name = unit_of(value)
    return f"{digits(value / unit)} {name}" if unit > 1 else f"{value} B"


def unit_of(value: int, largest: int = 40) -> tuple[int, str]:
    """The largest binary unit in which `value` is at least 1, of at most ``2**largest`` bytes, and its name."""
    units = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
    return next((2**power, name) for power, name in units if power <= largest and (value >= 2**power or not power))


def _decimal(value: float, unit: str) -> str:
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def bytes_each(value: float | None) -> str:
    """Bytes per parameter, if there are."""
    return "" if value is None else f"{value:.4g}"


def headline(plan: dict[str, Any]) -> str:
    """Model, layout, strategy and batch in one line."""
    settings, each = plan["settings"], plan["layout"]["bytes_per_parameter"]
    ways = [settings["strategy"]]
    ways += [f"groups of {settings['shard']}"] if settings["shard"] else []
    ways += [f"tensor parallel {settings['tensor_parallel']}"] if settings["tensor_parallel"] > 1 else []
    gpus = f"{settings['gpus']} GPU{'s' * (settings['gpus'] > 1)}"
    placed = gpus if ways == ["single"] else f"{', '.join(ways)} on {gpus}"
    total, active = plan["parameters"], plan["active_parameters"]
    counted = f"{total:,} parameters" + (f", {active:,} active" if active < total else "")
    batch = f"; batch {settings['batch']}, {settings['seq']:,} tokens" if settings["batch"] and settings["seq"] else ""
    return f"{counted}; {plan['layout']['name']} ({each:.4g} B each); {placed}{batch}"


def _parts(plan: dict[str, Any]) -> list[Any]:
    rows: list[Sequence[Any]] = [
        (
            part["name"],
            bytes_each(part["per_parameter"]),
            str(part["divisor"]) if part["divisor"] > 1 else "",
            ("" if part["exact"] else "≈ ") + size(part["bytes"]),
            _PHASES[part["phase"]] if part["place"] == "gpu" else "on the host",
            part["note"],
        )
        for part in plan["parts"]
    ]
    totals = plan["totals"]
    phases = totals["backward"] or totals["step"]
    sums = [
        ("always", totals["state"], "weights, gradients, states, buckets", True),
        ("and in fwd, bwd", totals["backward"], "", totals["backward"]),
        ("and in the step", totals["step"], "", totals["step"]),
        ("peak", totals["peak"], "always, and the larger of the two", phases),
        ("on the host", totals["host"], "for this GPU", totals["host"]),
    ]
    rows.append(())
    for name, value, note, shown in sums:
        style = "strong" if name in ("peak", "always") else ""
        rows += [(text(name, style), "", "", text(size(value), style), "", note)] if shown else []
    header = ("part", "B/param", "÷", "per GPU", "when", "")
    return [Table(header, rows, {1, 2, 3}, ruled=True, wraps=5)]


def _messages(plan: dict[str, Any]) -> list[Any]:
    rows = [
        (
            each["what"],
            each["name"],
            str(each["ranks"]) if each["ranks"] > 1 else "",
            str(each["times"]),
            bytes_each(each["per_parameter"]),
            size(each["bytes"]),
        )
        for each in plan["communication"]
    ]
    header = ("what", "operation", "GPUs", "times", "B/param", "in all")
    title = text("Sent by each GPU in a step", "strong")
    return ["", title, "", Table(header, rows, {2, 3, 4, 5}, ruled=True)] if rows else []


def _work(plan: dict[str, Any]) -> list[str]:
    work, gpu = plan["work"], plan["card"]
    said = []
    if work is not None:
        again = work["hardware"] - work["training"]
        more = f", and {_decimal(again, 'FLOP')} recomputed for checkpointing" if again else ""
        about = "" if work["exact"] else "≈ "
        said.append(f"Work of a step: {about}{_decimal(work['training'], 'FLOP')} per GPU{more}.")
    crossing = sum(each["bytes"] for each in plan["communication"] if each["name"].startswith("copy "))
    if crossing:
        times = " and ".join(f"{digits(1e3 * crossing / rate)} ms at {rate // 10**9} GB/s" for _, rate in BUSES)
        said.append(f"{size(crossing)} cross the bus: {times}, as over PCIe 4.0 and 5.0 with 16 lanes.")
    moved = f"The optimizer's step moves at least {size(plan['step_traffic'])}"
    offloaded = gpu is not None and plan["settings"]["offload"]
    if offloaded:
        moved += ", in the host's memory"
    if gpu is None or gpu["bandwidth"] is None:  # a card of which only the memory is known
        return [*said, moved + "."]
    if not offloaded:
        moved += f": {digits(1e3 * plan['step_traffic'] / gpu['bandwidth'])} ms at {gpu['bandwidth'] / 1e12:g} TB/s"
    said.append(moved + ".")
    if work is not None:
        peak = f"At {gpu['flops'] / 1e12:g} TFLOP/s, the {gpu['name']}'s dense 16-bit peak"
        said.append(f"{peak}, the work takes {digits(1e3 * (work['hardware'] / gpu['flops']))} ms.")
    if plan["mfu"] is not None:
        said.append(f"MFU {plan['mfu']:.3f}, HFU {plan['hfu']:.3f}; 0.5 and above is good.")
        if plan["hfu"] > 1:
            said.append("HFU above 1 exceeds the card's peak: check the time, the batch and the card.")
    return said


def verdict(plan: dict[str, Any]) -> str:
    """Whether a plan fits its card, in one sentence."""
    gpu, peak, host = plan["card"], size(plan["totals"]["peak"]), plan["totals"]["host"]
    if gpu is None:
        return f"{peak} per GPU at the peak. --card, such as --card 24GiB, tells whether that fits, and what does."
    named = gpu["name"] if gpu["name"][:1].isdigit() else f"{gpu['name']} ({size(gpu['memory'])})"  # 24 GiB is a name
    gpus = plan["settings"]["gpus"]
    peak += f" on each of {gpus:,} GPUs" if gpus > 1 else ""
    fits, left = ("Fits", "left of") if gpu["fits"] else ("Does not fit", "more than")
    than = f"{size(abs(gpu['left']))} {left} the {size(gpu['usable'])} after the reserve"
    placed = f"; {size(host)} of the host's memory per GPU" if host else ""
    return f"{fits} {named}: {peak} at the peak, {than}{placed}."


def _verdict(content: dict[str, Any]) -> list[Any]:
    """The verdict, the plan in a line and, if it does not fit, the smallest changes with which it does."""
    (plan,) = content["plans"]
    fits = plan["card"]["fits"] if plan["card"] else None
    style = {True: "good", False: "bad", None: "strong"}[fits]
    shown: list[Any] = [text(verdict(plan), style), headline(plan), ""]
    if content["ways"]:
        shown.append("It fits with any one of these, the smallest change first:")
        for way in content["ways"]:
            shown += ["", text(f"  {typed(way['options'])}  ({size(way['peak'])})", "strong")]
            shown.append(Table((), [("  ", cost) for cost in way["costs"]], wraps=1))
        shown.append("")
    elif fits is False:
        shown += ["No four changes of layout, step, attention, loss, checkpointing, batch, sequence, LoRA, offload and "
                  "number of GPUs, up to 64, make it fit.", ""]  # fmt: skip
    return shown


def typed(options: dict[str, str | None]) -> str:
    """Options as on the command line; those to leave out are named so."""
    named = {OF_A_PLAN[name].also or name: value for name, value in options.items()}
    words = [f"--{name} {value}".rstrip() for name, value in named.items() if value is not None]
    return " ".join([*words, *(f"(without --{name})" for name, value in named.items() if value is None)])


NOTHING_FITS = {"params": "no model", "layers": "not even one layer", "batch": "not even one sequence"}


def _fit(largest: dict[str, Any] | None) -> list[str]:
    if largest is None:
        return []
    what, best = largest["what"], largest["plan"]
    if best is None:
        return [f"{NOTHING_FITS[what].capitalize()} fits."]
    parameters, at = f"{best['parameters']:,} parameters", size(best["totals"]["peak"])
    if what == "params":
        return [f"The largest that fits: {parameters}, at {at}, activations not counted."]
    if what == "layers":
        return [f"The largest that fits: {best['settings']['model']['layers']} layers ({parameters}), at {at}."]
    return [f"The largest that fits: a micro-batch of {best['settings']['batch']}, at {at}."]


def _comparison(content: dict[str, Any]) -> list[Any]:
    plans = content["plans"]
    unit, name = unit_of(max(plan["totals"]["peak"] for plan in plans), 30)
    counts = numbers_of_gpus(content)
    scaled, hosted = len(counts) > 1, any(plan["totals"]["host"] for plan in plans)
    header = [{"layouts": "layout", "strategies": "strategy"}[content["compare"]], *["GPUs"] * scaled]
    layouts = content["compare"] == "layouts"
    header += [*["B/param"] * layouts, "weights", "gradients", "states", *["always"] * (not layouts), "peak", "sent"]
    header += ["host"] * hosted
    right = range(1, len(header))
    header += ["fits"] * (plans[0]["card"] is not None)
    rows: list[Sequence[str]] = []
    for plan in plans:
        totals, settings = plan["totals"], plan["settings"]
        by_name = {part["name"]: part["bytes"] for part in plan["parts"]}
        states = sum(by_name.get(state, 0) for state in STATES)
        gradients = by_name["gradients"] + by_name.get("accumulated gradients", 0)
        cells = [by_name["weights"], gradients, states, *[totals["state"]] * (not layouts), totals["peak"]]
        cells.append(plan["bytes_sent"])
        cells += [totals["host"]] * hosted
        fits = [] if plan["card"] is None else ["yes" if plan["card"]["fits"] else "no"]
        kept = [part["per_parameter"] for part in plan["parts"] if part["per_parameter"] and part["name"] in COUNTED]
        groups = f", shard {settings['shard']}" if settings["shard"] else ""
        first = [settings["strategy"] + groups, f"{settings['gpus']:,}"] if scaled else [plan["label"]]
        first += [bytes_each(sum(kept))] * layouts
        rows.append([*first, *(digits(cell / unit) if cell else "0" for cell in cells), *fits])
        if scaled and settings["gpus"] == counts[-1] and plan is not plans[-1]:
            rows.append([""] * len(header))
    shared = plans[0]["settings"]["strategy"] if content["compare"] == "layouts" else plans[0]["layout"]["name"]
    if not scaled:  # otherwise the numbers of GPUs have a column
        shared = gpus_of(content) if shared == "single" else f"{shared} on {gpus_of(content)}"
    title = f"{plans[0]['parameters']:,} parameters; {shared}; per GPU, {name}"
    return [text(title, "strong"), "", Table(header, rows, right, ruled=True)]


def numbers_of_gpus(content: dict[str, Any]) -> list[int]:
    """The numbers of GPUs of the plans, without repetitions."""
    return list(dict.fromkeys(plan["settings"]["gpus"] for plan in content["plans"]))


def gpus_of(content: dict[str, Any]) -> str:
    """The text "1 GPU", "8 GPUs" or "8, 64 and 1,024 GPUs"."""
    *others, last = (f"{count:,}" for count in numbers_of_gpus(content))
    return f"{', '.join(others)} and {last} GPUs" if others else f"{last} GPU{'s' * (last != '1')}"


STATES = ("master", "remainder", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
COUNTED = ("weights", "gradients", *STATES)  # by "B/param"; gradients that are stepped in the backward have none


def shown(content: dict[str, Any]) -> list[Any]:
    """The content of ``--json`` as tables and sentences."""
    if content["compare"] is not None:
        return _comparison(content)
    (plan,) = content["plans"]
    return [*_verdict(content), *_parts(plan), *_messages(plan), "", *sentences(content)]


def sentences(content: dict[str, Any]) -> list[str]:
    """What is said of a plan below its tables."""
    (plan,) = content["plans"]
    notes = [f"{each['what'].capitalize()}: {each['note']}." for each in plan["communication"] if each["note"]]
    said = [*notes, *_work(plan), *_fit(content["fit"])]
    if plan["layout"]["note"]:
        said.append(f"{plan['layout']['name']}: {plan['layout']['note']}.")
    if plan["settings"]["model"] is None:
        said.append("Activations and gathered units are not included: they are unknown without a shape.")
    return said

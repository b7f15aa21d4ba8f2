"""``mergegate plan``: forecast bytes, memory, disk, time and cost of a merge from headers alone.

For a profile, it also forecasts the power of the gate, if its documents have been counted and its models scored before.
Weights are neither read nor downloaded. The time follows from rates that mergegate measures on this machine in less
than half a second and stores for an hour. The cost is that time at the user's prices.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.candidates import recipe_of_file
from mergegate.flows.operations.console import printed_text
from mergegate.flows.operations.merge import plan_recipe
from mergegate.merge_core import EngineSettings, Finding, MergePlan, Recipe
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, find_kind
from mergegate.merge_core.engine.forecast import Duration, Needs, Rates, duration, estimate_needs, input_files
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.system import system_memory
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.base.stage import home, nearest_directory
from mergegate.tasks.models.checkpoints import size_of_adapter
from mergegate.tasks.preflight import describe_judging

if TYPE_CHECKING:
    from mergegate.flows.profile import Profile
    from mergegate.tasks.merge import RouterNeeds, StatisticsNeeds
    from mergegate.tasks.models.checkpoints import ResolvedCheckpoint
    from mergegate.tasks.quality.gate import GatePower


# Maximum age of measured rates, and the name of their file in the project's state.
_RATES_AGE_S = 3600.0
_RATES_FILE = "rates.json"
# Memory per element of a decomposed change in float32: itself, three factors, their product and the rest.
_DECOMPOSED_BYTES = 6 * 4


@dataclass(frozen=True)
class MergeForecast:
    """Facts about a merge before it starts.

    Args:
        recipe: One-line summary of the recipe.
        method: Name of the merge method.
        needs: Memory, disk and work that the merge needs on any machine.
        place: Directory on the disk of the result.
        disk_free: Free bytes on that disk.
        bytes_to_download: Bytes of parents on the Hub that are not in the cache.
        cores: Cores that the merge may use.
        rates: Measured rates of this machine. None without a measurement.
        time: Duration on this machine. None without rates.
        prices: Dollars per hour, by the name that the user gave to each price.
        power: Power of the profile's gate. None for a recipe, or if no documents have been counted.
        is_adapter: Whether the result is an adapter, so that the needs are those of combining adapters.
        statistics: Needs of the calibration statistics. None if the recipe needs none.
        routers: Needs of the router repair. None if the recipe has none.
        findings: Warnings about the recipe.
        remarks: Window of each training run, and the checkpoints that are left out.
        power_is_unknown: Whether the power needs a count of documents that ``mergegate check`` makes.
        kind: Kind of the merge.
    """

    recipe: str
    method: str
    needs: Needs
    place: Path
    disk_free: int
    bytes_to_download: int
    cores: int
    rates: Rates | None
    time: Duration | None
    prices: Mapping[str, float]
    power: GatePower | None = None
    is_adapter: bool = False
    statistics: StatisticsNeeds | None = None
    routers: RouterNeeds | None = None
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    power_is_unknown: bool = False
    kind: ModelKind = TEXT_GENERATOR

    @property
    def disk_missing(self) -> int:
        """Bytes that the disk lacks for the result. 0 if it fits."""
        return max(0, self.needs.disk - self.disk_free)

    def __str__(self) -> str:
        return printed_text(lambda console: print_plan(self, console))

    def cost(self, price: float) -> tuple[float, float] | None:
        """Return the lowest and highest cost in dollars on an instance as fast as this machine. None without a time."""
        return None if self.time is None else (self.time.at_least / 3600 * price, self.time.at_most / 3600 * price)


@dataclass(frozen=True)
class PlanOptions:
    """Options of a forecast.

    The directory ``out`` need not exist. ``prices`` are dollars per hour by name. ``probe`` tells whether to measure
    this machine now (True), never (False), or if the last measurement is more than an hour old (None).
    """

    out: Path
    device: str
    prices: Mapping[str, float]
    probe: bool | None


def plan_file(file: Path | Profile, options: PlanOptions) -> MergeForecast:
    """Forecast the merge of a recipe file or of a profile, and the power of a profile's gate.

    Raises:
        InvalidInput: The file is invalid, or its parents cannot be planned.
        Refused: Parents are not accessible.
    """
    from mergegate.flows.profile import is_recipe, load_profile

    profile = None if isinstance(file, Path) and is_recipe(file) else load_profile(file)
    if profile is None:
        assert isinstance(file, Path)  # because it is a recipe
        candidate = recipe_of_file(file)
    else:
        candidate = profile.candidates()[0]
    loaded = candidate.recipe
    parents, merge_plan = plan_recipe(loaded)
    forecast = forecast_of(loaded, parents, merge_plan, options)
    forecast = replace(forecast, findings=loaded.all_findings, remarks=candidate.remarks)
    if profile is None:
        return forecast
    # Forecast the power of the gate from the store alone, without loading or counting data.
    from mergegate.flows.preflight import past_guards, pin_profile_evidence
    from mergegate.tasks.base.stage import store
    from mergegate.tasks.preflight import forecast_power
    from mergegate.tasks.quality.evaluation import find_pinned_data

    evidence = pin_profile_evidence(profile, parents, store().hashes)
    evidence = evidence._replace(tasks=tuple(find_pinned_data(task) or task for task in evidence.tasks))
    attempts = len(profile.candidates()) + profile.max_further_attempts
    measured = tuple(parent for parent in parents if parent.ref not in evidence.unmeasured)
    power = forecast_power(evidence, measured, attempts, past_guards(profile.name))
    return replace(forecast, power=power, power_is_unknown=profile.evaluate is not None and power is None)


def named_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse texts of the form ``NAME=USD``, or raise InvalidInput."""
    prices = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            price = float(amount.removeprefix("$"))
        except ValueError:
            price = -1.0
        if not name or not 0 <= price < float("inf"):
            raise InvalidInput(
                "--price",
                found=f"{text!r}",
                expected="NAME=USD, in dollars per hour",
                remedy="for example --price my-box=1.20",
            )
        prices[name.strip()] = price
    return prices


def forecast_of(
    recipe: Recipe, parents: Sequence[ResolvedCheckpoint], plan: MergePlan, options: PlanOptions
) -> MergeForecast:
    """Forecast a merge whose parents and plan are known.

    Raises:
        InvalidInput: The device does not exist.
    """
    from mergegate.merge_core.system import cores_of_process
    from mergegate.tasks.base.stage import device_kind, store

    device = device_kind() if options.device == "auto" else options.device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InvalidInput("--device", found=f"{device!r}", expected="auto, cpu, cuda or cuda:N")
    size = size_of_adapter(recipe, parents)
    snapshots = {snapshot.directory: snapshot for parent in parents for snapshot in parent.snapshots}
    directory, cores = nearest_directory(options.out), cores_of_process()
    needs = estimate_needs(plan, EngineSettings(), cores=cores, device=device, companion_bytes=plan.companions.nbytes())
    inputs = [file for file in input_files(plan) if file.exists()]
    # Decomposing changes takes most of the time of an adapter, and that time cannot be forecast.
    rates = None if size else machine_rates(inputs, directory, cores, device, options.probe)
    if size:
        # Factors stay in memory until they are written, in addition to the decomposition of one change at a time.
        scratch = _DECOMPOSED_BYTES * size.largest if size.scratch else 0
        needs = replace(
            needs,
            device="cpu",
            tensors=size.tensors,
            parameters=size.parameters,
            input_files=size.files,
            shards=1,
            bytes_read=size.read,
            bytes_read_again=0,
            bytes_from_disk_again=0,
            bytes_passed=size.read,
            bytes_written=size.nbytes,
            passes=1,
            read_again=0,
            memory=needs.memory + size.nbytes + scratch,
            gpu_memory=0,
            disk=size.nbytes + size.scratch,
        )
    statistics = routers = None
    if recipe.texts:
        from mergegate.tasks.merge import router_needs, statistics_needs

        statistics, routers = statistics_needs(plan, store().hashes), router_needs(plan, store().hashes)
    return MergeForecast(
        recipe=plan.recipe.summary(),
        method=plan.method.name,
        needs=needs,
        place=directory,
        disk_free=shutil.disk_usage(directory).free,
        bytes_to_download=sum(snapshot.bytes_to_download for snapshot in snapshots.values()),
        cores=cores,
        rates=rates,
        time=duration(needs, rates, cores=cores) if rates else None,
        prices=options.prices,
        is_adapter=bool(size),
        statistics=statistics,
        routers=routers,
        kind=find_kind(plan.config, plan.companions),
    )


def machine_rates(inputs: Sequence[Path], directory: Path, cores: int, device: str, probe: bool | None) -> Rates | None:
    """Return the rates of this machine: stored ones from the last hour, or new measurements.

    A measurement reads ``inputs``, local weight files, and writes to ``directory``, on the disk of the result.
    ``probe`` tells whether to measure always (True), never (False), or only without stored rates (None). If nothing is
    stored or measured, return None.
    """
    from mergegate.merge_core.engine.forecast import (
        load_rates,
        machine_key,
        measure_bus,
        measure_machine,
        measure_products_on,
        save_rates,
    )

    file = home() / _RATES_FILE
    key = machine_key(inputs, directory, cores=cores, device=device)
    rates_on_file = None if probe is True else load_rates(file, key, max_age=_RATES_AGE_S)
    if rates_on_file is not None or probe is False:
        return rates_on_file
    rates = measure_machine(inputs, directory, cores=cores)
    if device != "cpu":
        rates = replace(rates, bus=measure_bus(device), products=measure_products_on(device))
    save_rates(file, key, rates)
    return rates


def print_plan(forecast: MergeForecast, console: Console) -> None:
    """Print the findings about the recipe and the windows of its training runs, then the forecast."""
    for finding in forecast.findings:
        console.print(Text(f"! {finding}" + (f"; {finding.remedy}" if finding.remedy else ""), style="yellow"))
    for remark in forecast.remarks:
        console.print(Text(remark))
    print_forecast(forecast, console)
    if forecast.power_is_unknown:
        note = "power: unknown, because the documents have not been counted yet; mergegate check counts them"
        console.print(Text(note, style="dim"))
    if forecast.power or forecast.power_is_unknown:
        console.print(Text("To list the evaluations of a run, run mergegate run with --dry-run.", style="dim"))


def print_forecast(forecast: MergeForecast, console: Console) -> None:
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, remark in _rows(forecast):
        # The parts of a time are below it, dimmed.
        part = name.startswith(" ")
        table.add_row(Text(name, style="dim" if part else "bold"), Text(value, style="dim" if part else ""), remark)
    console.print(Text(forecast.recipe, style="bold"))
    if forecast.kind.name != TEXT_GENERATOR.name:
        console.print(Text(f"The merge is {forecast.kind.noun}, {describe_judging(forecast.kind)}."))
    console.print(table)
    if forecast.disk_missing:
        console.print(
            Text(
                f"✗ {format_bytes(forecast.disk_missing)} more disk space needed at {forecast.place}", style="bold red"
            )
        )
    for line in forecast.power.lines() if forecast.power else ():
        console.print(Text(line))
    if forecast.rates is not None:
        age = time.time() - forecast.rates.measured_at
        when = "just now" if age < 5 else f"{_seconds(age)} ago"
        footnote = f"Speeds of this machine, measured {when}; starting takes a few more seconds."
        console.print(Text(footnote, style="dim"))
    if forecast.prices and forecast.time is not None:
        console.print(Text("The cost is for an instance at your price, as fast as this machine.", style="dim"))
    console.print(Text("To find problems of the merge, run mergegate check.", style="dim"))


def _rows(forecast: MergeForecast) -> list[tuple[str, str, str]]:
    """Return name, value and remark of every line. A name that starts with a space belongs to the line above."""
    needs = forecast.needs
    rows = [("tensors", f"{needs.tensors:,}", f"{_count(needs.parameters)} parameters")]
    if forecast.bytes_to_download:
        rows.append(
            ("download", format_bytes(forecast.bytes_to_download), "from the Hub; the time below does not include it")
        )
    rows.append(("read", format_bytes(needs.bytes_read), format_count(needs.input_files, "file")))
    if needs.read_again:
        large = format_count(needs.read_again, "large tensor")
        rows.append(
            ("read again", format_bytes(needs.bytes_from_disk_again), f"{large} in up to {needs.passes} passes")
        )
    rows.append(("write", format_bytes(needs.bytes_written), format_count(needs.shards, "file")))
    rows.append(("memory", format_bytes(needs.memory), "at the peak, about"))
    if needs.gpu_memory:
        rows.append(("GPU memory", format_bytes(needs.gpu_memory), "at the peak, about"))
    rows.append(("disk", format_bytes(needs.disk), f"{format_bytes(forecast.disk_free)} free at {forecast.place}"))
    if forecast.statistics:
        rows.append(("statistics", format_bytes(forecast.statistics.nbytes), forecast.statistics.summary()))
    if forecast.routers:
        rows.append(("routers", format_bytes(forecast.routers.states), forecast.routers.summary()))
        rows.append(("", "", "memory for one layer; the store also holds the merge before the repair"))

    rates, took = forecast.rates, forecast.time
    if forecast.is_adapter:
        rows.append(("time", "unknown", "the time to decompose changes cannot be forecast"))
    elif took is None or rates is None:
        rows.append(("time", "unknown", "this machine was not measured: omit --no-probe"))
    else:
        least, most = _seconds(took.at_least), _seconds(took.at_most)
        rows.append(("time", least if least == most else f"{least} to {most}", "with full overlap, or none"))
        rows.append(("  reading", _seconds(took.reading), f"{format_bytes(rates.read)}/s"))
        if needs.read_again:
            rows.append(("  reading again", _seconds(took.reading_again), "if they do not fit in memory"))
        rows.append(("  writing", _seconds(took.writing), f"{format_bytes(rates.write)}/s"))
        rows.append(
            ("  computing", _seconds(took.computing), f"{needs.device}, {format_count(forecast.cores, 'core')}")
        )
        rows.append(("  sha256", _seconds(took.hashing), f"{format_bytes(rates.hash)}/s"))
        if needs.assumed_cost:
            rows.append(("", "", f"assumed speed of {', '.join(needs.assumed_cost)}"))
        for name, price in forecast.prices.items():
            cheapest, dearest = forecast.cost(price) or (0.0, 0.0)
            rows.append((f"cost {name}", f"${cheapest:,.2f} to {dearest:,.2f}", f"at ${price:g} per hour"))
    memory = system_memory()
    if forecast.statistics and forecast.rates and memory:
        seconds = forecast.statistics.seconds(forecast.rates, memory.available // 2)
        rows += [("  statistics", _seconds(seconds), "before the merge, unless they are cached")] if seconds else []
    if forecast.routers and rates and (seconds := forecast.routers.seconds(rates)):
        rows.append(("  routers", _seconds(seconds), "after a first merge, unless they are cached"))
    return rows


def _seconds(value: float) -> str:
    if value < 1:
        return "< 1 s"
    if value < 90:
        return f"{value:.0f} s"
    if value < 90 * 60:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def _count(value: float) -> str:
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.1f} B"

"""``mergegate plan``: forecast bytes, memory, disk, time and cost of a merge from headers alone.

For a profile, it also forecasts the power of the gate, if documents have been counted and models scored before.

Weights are neither read nor downloaded. The time follows from rates that are measured on this machine in less than half
a second and stored for an hour. The cost is that time at the user's prices.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.recipe_parents import plan_recipe
from mergegate.merge_core import EngineSettings, MergePlan, Recipe, load_recipe
from mergegate.merge_core.engine.forecast import Duration, Needs, Rates, duration, estimate_needs, input_files
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.system import system_memory
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints import size_of_adapter
from mergegate.tasks.stage import home, nearest

if TYPE_CHECKING:
    from mergegate.flows.profile import Profile
    from mergegate.merge_core.adapters import CombinedSize
    from mergegate.tasks.checkpoints import ResolvedCheckpoint
    from mergegate.tasks.gate import GatePower
    from mergegate.tasks.merge import StatisticsNeeds

# Maximum age of measured rates, and the name of their file in the project's state.
_RATES_AGE_S = 3600.0
_RATES_FILE = "rates.json"
# Memory per element of a decomposed change in float32: itself, three factors, their product and the rest.
_DECOMPOSED_BYTES = 6 * 4


@dataclass(frozen=True)
class Forecast:
    """Facts about a merge before it starts.

    Args:
        recipe: One-line summary of the recipe.
        method: Name of the merge method.
        needs: Requirements on any machine.
        place: Directory on the disk of the result.
        disk_free: Free bytes on that disk.
        bytes_to_download: Bytes of parents on the Hub that are not in the cache.
        cores: Cores that the merge may use.
        rates: Measured rates of this machine. None without a probe.
        time: Duration on this machine. None without rates.
        prices: Dollars per hour by name, from the user.
        power: Power of the profile's gate. None for a recipe, or if no documents have been counted.
        is_adapter: Whether the result is an adapter, so that the needs are those of combining adapters.
        statistics: Needs of the calibration statistics. None if the recipe names no texts.
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

    @property
    def disk_missing(self) -> int:
        """Bytes missing on the disk for the result. 0 if it fits."""
        return max(0, self.needs.disk - self.disk_free)

    def cost(self, price: float) -> tuple[float, float] | None:
        """Return the lowest and highest cost in dollars on an instance as fast as this one. None without a time."""
        return None if self.time is None else (self.time.at_least / 3600 * price, self.time.at_most / 3600 * price)


def plan_file(
    file: Path,
    console: Console,
    as_json: bool,
    *,
    out: Path,
    device: str,
    prices: Sequence[str],
    probe: bool | None,
) -> None:
    """Print what merging the recipe in ``file`` needs.

    Args:
        file: Recipe or profile.
        console: Console for human-readable lines.
        as_json: Whether to print one JSON object instead.
        out: Directory of the result. It need not exist.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        prices: ``NAME=DOLLARS_PER_HOUR``.
        probe: Whether to measure now (True), never (False), or only if the last measurement is more than an hour old
            (None).

    Raises:
        InvalidInput: A recipe or checkpoint cannot be merged, or an option is invalid.
    """
    prices_by_name = named_prices(prices)
    from mergegate.flows.profile import is_recipe, load_profile

    profile = None if is_recipe(file) else load_profile(file)
    recipe = profile.candidates()[0].recipe if profile else load_recipe(file)
    with console.status("reading headers"):
        parents, plan = plan_recipe(recipe)
        forecast = forecast_of(recipe, parents, plan, out, device, prices_by_name, probe)
    if profile:
        forecast = replace(forecast, power=_known_power(profile, parents))
    if as_json:
        print_answer("planned", forecast.recipe, _plain(forecast), recipe.all_findings)
        return
    for finding in recipe.all_findings:
        console.print(Text(f"! {finding}" + (f"; {finding.remedy}" if finding.remedy else ""), style="yellow"))
    print_forecast(forecast, console)
    if profile and profile.evaluate and forecast.power is None:
        console.print(Text("power: its documents have not been counted here yet; mergegate check does", style="dim"))


def named_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse ``NAME=DOLLARS_PER_HOUR``, or raise InvalidInput."""
    return dict(_price(text) for text in texts)


def forecast_of(
    recipe: Recipe,
    parents: Sequence[ResolvedCheckpoint],
    plan: MergePlan,
    out: Path,
    device: str,
    prices: Mapping[str, float],
    probe: bool | None,
) -> Forecast:
    """Forecast a merge whose parents and plan are known.

    Arguments and errors are those of :func:`plan_file`.
    """
    size = size_of_adapter(recipe, parents)
    snapshots = {snapshot.directory: snapshot for parent in parents for snapshot in parent.snapshots}
    coming = sum(snapshot.bytes_to_download for snapshot in snapshots.values())
    # Decomposing changes takes most of the time of an adapter, and that time cannot be forecast.
    forecast = make_forecast(plan, coming, out, device, prices, False if size else probe)
    if recipe.texts:
        from mergegate.tasks.merge import statistics_needs
        from mergegate.tasks.stage import store

        forecast = replace(forecast, statistics=statistics_needs(plan, store().hashes))
    if size:
        forecast = replace(forecast, needs=_needs_of_adapter(forecast.needs, size), rates=None, time=None)
        forecast = replace(forecast, is_adapter=True)
    return forecast


def _known_power(profile: Profile, parents: Sequence[ResolvedCheckpoint]) -> GatePower | None:
    """Forecast the power of the gate from the store alone, without loading or counting data."""
    from mergegate.flows.preflight import past_guards, pin_profile_evidence
    from mergegate.tasks.evaluation import find_pinned_data
    from mergegate.tasks.preflight import forecast_power
    from mergegate.tasks.stage import store

    evidence = pin_profile_evidence(profile, parents, store().hashes)
    tasks = tuple(find_pinned_data(task) or task for task in evidence.tasks)
    return forecast_power(
        evidence._replace(tasks=tasks), parents, len(profile.candidates()) + profile.proposed, past_guards(profile.name)
    )


def make_forecast(
    plan: MergePlan, bytes_to_download: int, out: Path, device: str, prices: Mapping[str, float], probe: bool | None
) -> Forecast:
    """Forecast the execution of ``plan``.

    Args:
        bytes_to_download: Bytes of parents on the Hub. The other arguments are those of :func:`plan_file`.
    """
    from mergegate.merge_core.system import cores_of_process
    from mergegate.tasks.stage import device_kind

    device = device_kind() if device == "auto" else device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InvalidInput("--device", found=f"{device!r}", expected="auto, cpu, cuda or cuda:N")
    directory, cores = nearest(out), cores_of_process()
    needs = estimate_needs(plan, EngineSettings(), cores=cores, device=device, companion_bytes=plan.companions.nbytes())
    inputs = [file for file in input_files(plan) if file.exists()]
    rates = machine_rates(inputs, directory, cores, device, probe)
    return Forecast(
        recipe=plan.recipe.summary(),
        method=plan.method.name,
        needs=needs,
        place=directory,
        disk_free=shutil.disk_usage(directory).free,
        bytes_to_download=bytes_to_download,
        cores=cores,
        rates=rates,
        time=duration(needs, rates, cores=cores) if rates else None,
        prices=prices,
    )


def _needs_of_adapter(model_needs: Needs, size: CombinedSize) -> Needs:
    """Return the needs of combining adapters, given the needs of the complete model.

    Factors stay in memory until they are written, in addition to the decomposition of one change at a time.
    """
    return replace(
        model_needs,
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
        memory=model_needs.memory + size.nbytes + (_DECOMPOSED_BYTES * size.largest if size.scratch else 0),
        gpu_memory=0,
        disk=size.nbytes + size.scratch,
    )


def machine_rates(inputs: Sequence[Path], directory: Path, cores: int, device: str, probe: bool | None) -> Rates | None:
    """Return the rates of this machine, measured in the last hour or now.

    Args:
        inputs: Local weight files.
        directory: A directory on the disk of the result.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        probe: Whether to measure now (True), never (False), or only if the last measurement is more than an hour old
            (None).
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


def _price(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        price = float(amount.removeprefix("$"))
    except ValueError:
        price = -1.0
    if not name or not 0 <= price < float("inf"):
        raise InvalidInput(
            "--price", found=f"{text!r}", expected="NAME=DOLLARS_PER_HOUR", remedy="for example --price my-box=1.20"
        )
    return name.strip(), price


def print_forecast(forecast: Forecast, console: Console) -> None:
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, remark in _rows(forecast):
        # The parts of a time are below it, dimmed.
        part = name.startswith(" ")
        table.add_row(Text(name, style="dim" if part else "bold"), Text(value, style="dim" if part else ""), remark)
    console.print(Text(forecast.recipe, style="bold"))
    console.print(table)
    if forecast.disk_missing:
        console.print(
            Text(f"✗ {format_bytes(forecast.disk_missing)} more are needed at {forecast.place}", style="bold red")
        )
    for line in forecast.power.lines() if forecast.power else ():
        console.print(Text(line))
    for line in _footnotes(forecast):
        console.print(Text(line, style="dim"))


def _rows(forecast: Forecast) -> list[tuple[str, str, str]]:
    """Return name, value and remark of every line. Parts of the line above start with a space."""
    needs = forecast.needs
    rows = [("tensors", f"{needs.tensors:,}", f"{_count(needs.parameters)} parameters")]
    if forecast.bytes_to_download:
        rows.append(("download", format_bytes(forecast.bytes_to_download), "from the Hub; its time is not counted"))
    rows.append(("read", format_bytes(needs.bytes_read), _plural(needs.input_files, "file")))
    if needs.read_again:
        large = _plural(needs.read_again, "large tensor")
        rows.append(
            ("read again", format_bytes(needs.bytes_from_disk_again), f"{large} in up to {needs.passes} passes")
        )
    rows.append(("write", format_bytes(needs.bytes_written), _plural(needs.shards, "file")))
    rows.append(("memory", format_bytes(needs.memory), "at the peak, about"))
    if needs.gpu_memory:
        rows.append(("GPU memory", format_bytes(needs.gpu_memory), "at the peak, about"))
    rows.append(("disk", format_bytes(needs.disk), f"{format_bytes(forecast.disk_free)} free at {forecast.place}"))
    if forecast.statistics:
        rows.append(("statistics", format_bytes(forecast.statistics.nbytes), forecast.statistics.summary()))
    return [*rows, *_time_rows(forecast), *_statistics_time(forecast)]


def _statistics_time(forecast: Forecast) -> list[tuple[str, str, str]]:
    memory = system_memory()
    if forecast.statistics is None or forecast.rates is None or memory is None:
        return []
    took = forecast.statistics.seconds(forecast.rates, memory.available // 2)
    return [("  statistics", _seconds(took), "before the merge, where they are not known yet")] if took else []


def _time_rows(forecast: Forecast) -> list[tuple[str, str, str]]:
    needs, rates, took = forecast.needs, forecast.rates, forecast.time
    if forecast.is_adapter:
        return [("time", "unknown", "that of decomposing changes is not forecast")]
    if took is None or rates is None:
        return [("time", "unknown", "nothing was measured: plan without --no-probe")]
    rows = [
        ("time", _range(took), "if all of it overlaps, or nothing"),
        ("  reading", _seconds(took.reading), f"{format_bytes(rates.read)}/s"),
        ("  writing", _seconds(took.writing), f"{format_bytes(rates.write)}/s"),
        ("  computing", _seconds(took.computing), f"{needs.device}, {_plural(forecast.cores, 'core')}"),
        ("  sha256", _seconds(took.hashing), f"{format_bytes(rates.hash)}/s"),
    ]
    if needs.read_again:
        rows.insert(2, ("  reading again", _seconds(took.reading_again), "if memory cannot hold them"))
    if needs.assumed_cost:
        rows.append(("", "", f"assumed, not known: the speed of {', '.join(needs.assumed_cost)}"))
    for name, price in forecast.prices.items():
        least, most = forecast.cost(price) or (0.0, 0.0)
        rows.append((f"cost {name}", f"${least:,.2f} to {most:,.2f}", f"at ${price:g} per hour"))
    return rows


def _footnotes(forecast: Forecast) -> list[str]:
    lines = []
    if forecast.rates is not None:
        age = time.time() - forecast.rates.measured_at
        when = "just now" if age < 5 else f"{_seconds(age)} ago"
        lines.append(f"Speeds of this machine, measured {when}; starting takes a few seconds more.")
    if forecast.prices and forecast.time is not None:
        lines.append("Prices are yours; cost is for an instance as fast as this machine.")
    return [*lines, "What can be wrong with the merge: mergegate check"]


def _range(took: Duration) -> str:
    least, most = _seconds(took.at_least), _seconds(took.at_most)
    return least if least == most else f"{least} to {most}"


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


def _plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _plain(forecast: Forecast) -> dict[str, Any]:
    plain = asdict(forecast)
    plain["place"] = str(forecast.place)
    plain["disk_missing"] = forecast.disk_missing
    plain["power"] = forecast.power.model_dump(mode="json") if forecast.power else None
    plain["cost"] = {name: forecast.cost(price) for name, price in forecast.prices.items()}
    return plain

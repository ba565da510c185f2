"""What is run: loads, networks, and the cases of the full and of the quick set. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.contract.spec import GptRecipe

ROOT = Path(__file__).resolve().parents[2]
GOODPUT = 0.957
"""The most payload that frames of 1500 bytes leave of a link's rate: the limit that a wire time is held against."""
MODELLED_MBIT = 10_000
"""A rate that this kind of lab does not reach: shown from a model, and marked."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank does between two exchanges.

    computes: forward and backward of a model; else its gradients are made outside the clock and only handed over.
    sequences: windows of recipe.context bytes that a rank computes a step.
    """

    name: str
    title: str
    recipe: GptRecipe
    sequences: int
    computes: bool


GPT_10M = GptRecipe(layers=6, width=384, heads=6, context=16)
GPT_25M = GptRecipe(layers=8, width=512, heads=8, context=16)
GPT_3M = GptRecipe(layers=4, width=256, heads=4, context=64)
LOADS = {
    load.name: load
    for load in (
        Load("gpt-10m", "GPT, 10.9 M parameters", GPT_10M, sequences=2, computes=True),
        Load("gpt-25m", "GPT, 25.5 M parameters", GPT_25M, sequences=2, computes=True),
        Load("gpt-3m", "GPT, 3.3 M parameters, longer windows", GPT_3M, sequences=4, computes=True),
        Load("exchange-25m", "exchange only, 25.5 M parameters", GPT_25M, sequences=0, computes=False),
        Load("tiny", "GPT, too small to time", GptRecipe(layers=1, width=16, heads=2, context=8), 2, computes=True),
        Load(
            "tiny-exchange",
            "exchange only, too small to time",
            GptRecipe(layers=1, width=16, heads=2, context=8),
            0,
            computes=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts and the rate of each one's link, both ways; None: the loopback of this machine, not shaped."""

    hosts: int
    rate_mbit: int | None

    @property
    def name(self) -> str:
        """As files and tables call it."""
        return f"{self.hosts}x{self.link}"

    @property
    def link(self) -> str:
        """The rate in words."""
        return rate_text(self.rate_mbit)


@dataclass(frozen=True, slots=True)
class Case:
    """A load over a network. budget_s: timed rounds begin until it is spent; there are fewest to most of them.

    turn_s: a turn has several steps where one is shorter, so that a few turns are no small sample.
    patience_s: a collective that takes so much longer than it should is given up. plugins: modules that add methods of
    their own to METHODS when they are imported.
    """

    load: Load
    network: Network
    methods: tuple[str, ...]
    budget_s: float = 60.0
    fewest_rounds: int = 3
    most_rounds: int = 15
    turn_s: float = 0.5
    patience_s: float = 60.0
    plugins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its result's file, without the suffix."""
        return f"{self.load.name}/{self.network.name}"


NETWORKS = (Network(2, 100), Network(4, 100), Network(2, 1000), Network(4, 1000), Network(2, 2700))
FULL_LOADS = ("exchange-25m", "gpt-25m", "gpt-10m")
QUICK = (("exchange-25m", Network(2, 1000)), ("gpt-10m", Network(2, 1000)), ("gpt-10m", Network(2, 100)))
"""The first one is what the engine is judged by; the others show both sides of the crossing."""


def full_set(methods: Iterable[str], loads: Iterable[str] = FULL_LOADS) -> list[Case]:
    """Every load over every network, fast links first: a set that is cut short has the cheap cases."""
    networks = sorted(NETWORKS, key=lambda network: (-(network.rate_mbit or 0), network.hosts))
    return [Case(LOADS[load], network, tuple(methods)) for network in networks for load in loads]


def quick_set(methods: Iterable[str], loads: Iterable[str] = FULL_LOADS) -> list[Case]:
    """Three cases with fewer rounds: under ten minutes in all."""
    chosen = set(loads)
    return [
        Case(LOADS[load], network, tuple(methods), budget_s=30.0, most_rounds=6)
        for load, network in QUICK
        if load in chosen
    ]


def loopback_set(methods: Iterable[str], load: str = "tiny", hosts: int = 2) -> list[Case]:
    """One case over the loopback: does it run here? Its times say nothing about a network."""
    return [Case(LOADS[load], Network(hosts, None), tuple(methods), budget_s=5.0, most_rounds=3, turn_s=0.0)]


def rate_text(rate_mbit: float | None) -> str:
    """100 Mbit, 2.7 Gbit; without spaces in names of files: the caller's."""
    if rate_mbit is None:
        return "loopback"
    return f"{rate_mbit / 1000:g}Gbit" if rate_mbit >= 1000 else f"{rate_mbit:.0f}Mbit"

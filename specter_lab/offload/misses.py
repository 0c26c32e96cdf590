"""Which of a layer's missing experts the host computes beside the device, instead of the link fetching them."""

from __future__ import annotations

from collections.abc import Callable

from specter_lab.pieces import Machine
from specter_lab.records import ExpertKey

Bytes = Callable[[ExpertKey], int]
"""What an expert takes: to be moved over the link, or to be read by the host."""


class SplitByFinish:
    """Splits the misses so that the later of the two lanes, link and host, ends first, given what both have to do already.

    The experts that the fewest rows use go to the host, and among those the least worth keeping: the others are likelier to
    be wanted again.

    Source: Fiddler (arXiv 2402.07033), whose rule decides for each expert alone; here the maximum of both lanes is
    minimised for the layer as a whole.

    >>> import specter_lab as sl
    >>> machine = sl.SimulatedMachine(link_gb_s=1.0, latency_us=0, host_gb_s=3.0)
    >>> len(SplitByFinish().on_host({ExpertKey(0, e): 1 for e in range(4)}, lambda key: 1000, lambda key: 1000, machine))
    3
    """

    name = "split by finish"

    def on_host(self, missing: dict[ExpertKey, int], moved: Bytes, read: Bytes, machine: Machine) -> set[ExpertKey]:
        """The best prefix of the misses, by rows then as given, with or without what is on the link already."""
        order = sorted((key for key in missing if moved(key)), key=lambda key: missing[key])
        coming = [key for key in missing if not moved(key)]
        best, chosen = float("inf"), set[ExpertKey]()
        for waited in (coming, []):
            host = machine.host_backlog_us() + sum(machine.host_us(read(key)) for key in coming if key not in waited)
            link = machine.link_backlog_us() + sum(machine.copy_us(moved(key)) for key in order)
            for taken in range(len(order) + 1):
                later = max(host, link) if taken < len(order) or waited else host
                if later < best:
                    best, chosen = later, {*order[:taken], *(key for key in coming if key not in waited)}
                if taken < len(order):
                    host += machine.host_us(read(order[taken]))
                    link -= machine.copy_us(moved(order[taken]))
        return chosen


class AlwaysHost:
    """Every miss runs on the host: nothing is fetched on demand.

    >>> import specter_lab as sl
    >>> len(AlwaysHost().on_host({ExpertKey(0, 1): 2}, lambda key: 1000, lambda key: 1000, sl.SimulatedMachine()))
    1
    """

    name = "always host"

    def on_host(self, missing: dict[ExpertKey, int], moved: Bytes, read: Bytes, machine: Machine) -> set[ExpertKey]:
        """All of them."""
        return set(missing)

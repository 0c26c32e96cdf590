"""Asking a model's own routers ahead of time, whatever else than hidden states they want.

Most routers take hidden states alone. Some also take a correction bias that lives beside them, what the router before
handed on, or the token ids. Which it is shows in one watched forward, by the identity of the objects that were passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class RouterCall:
    """One call of a router: ``args`` and ``kwargs`` as passed (states first), ``output`` as returned.

    ``ids``: (1, tokens) of the forward it was part of.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: tuple[Any, ...]
    ids: Tensor | None

    @property
    def states(self) -> Tensor:
        """(positions, hidden_size): what the router saw, whatever shape it was passed in."""
        states: Tensor = self.args[0]
        return states.reshape(-1, states.shape[-1])


class Routers:
    """The routers of a model's MoE layers, in layer order, and how each of them is called.

    ``learn`` must have seen one forward before ``pick``. While ``watched``, the last call is kept (and no other, since
    states of a long prompt are large).

    >>> import specter_lab as sl
    >>> routers = sl.load_moe("tiny-moe").routers
    >>> len(routers.modules), routers.calls_alike(0)
    (8, True)
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self.model, self.modules = model, tuple(modules)
        self.last: tuple[int, RouterCall] | None = None
        self._plans: list[tuple[list[Any], dict[str, Any], int]] = []
        self._ids: Tensor | None = None
        self._calls: dict[int, RouterCall] | None = None

    @contextmanager
    def watched(self, calls: dict[int, RouterCall] | None = None) -> Iterator[None]:
        """Inside, each router's call becomes ``last``; ``calls`` collects the first one of each layer."""
        self.watch()
        self._calls = calls
        try:
            yield
        finally:
            self.unwatch()

    def watch(self) -> None:
        """Begin to keep the last call; until ``unwatch``."""
        self._calls = None
        self._handles = [self.model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)]
        for layer, module in enumerate(self.modules):
            self._handles.append(module.register_forward_hook(self._called(layer), with_kwargs=True))

    def unwatch(self) -> None:
        """Let go of the hooks and of what was kept. Idempotent."""
        for handle in getattr(self, "_handles", ()):
            handle.remove()
        self._handles, self._calls, self.last, self._ids = [], None, None, None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, another forward may run or be left halfway: what was kept of this one is put back."""
        before = (self.last, self._ids)
        try:
            yield
        finally:
            self.last, self._ids = before

    def learn(self, calls: dict[int, RouterCall]) -> None:
        """Find out where each router's arguments come from."""
        held = {id(t) for t in [*self.model.parameters(), *self.model.buffers()]}

        def source(value: Any, before: RouterCall | None, ids: Tensor | None) -> Any:
            if not isinstance(value, Tensor) or id(value) in held:
                return _Constant(value)
            if value is ids:
                return _TokenIds()
            outputs = before.output if before is not None else ()
            return next((_Handed(i) for i, out in enumerate(outputs) if out is value), _Unknown())

        for layer in range(len(self.modules)):
            call, before = calls[layer], calls.get(layer - 1)
            self._plans.append((
                [source(value, before, call.ids) for value in call.args[1:]],
                {name: source(value, before, call.ids) for name, value in call.kwargs.items()},
                call.args[0].ndim,
            ))  # fmt: skip

    def calls_alike(self, layer: int) -> bool:
        """Whether that layer's router needs nothing but states and constants."""
        args, kwargs, _ = self._plans[layer]
        return all(isinstance(source, _Constant) for source in (*args, *kwargs.values()))

    def pick(self, layer: int, states: Tensor) -> Tensor:
        """(positions, hidden_size) -> (positions, experts_per_token): that layer's choice for ``states``.

        What the router wants besides is taken from the running forward, if that is over as many positions: what the
        router just before it returned, or the token ids. Raises ``ValueError`` where it can't be had: token ids, while no forward runs.
        """
        args, kwargs, ndim = self._plans[layer]
        ids = self._ids if self._ids is not None and self._ids.numel() == len(states) else None
        before = self.last[1] if ids is not None and self.last is not None and self.last[0] == layer - 1 else None

        def value(source: Any) -> Any:
            found = source.of(before, ids)
            if found is _MISSING:
                raise ValueError(
                    f"A router is asked ahead with what it needs at its place; that of MoE layer {layer} "
                    f"({type(self.modules[layer]).__name__}) needs token ids, and no forward over {len(states)} positions is running. "
                    "Ask while a pipeline decodes, or leave this predictor out."
                )
            return found

        # forward, not a call: a guess isn't the model's own call that the hooks look for
        shaped = states.reshape(*(1,) * (ndim - states.ndim), *states.shape)
        output = self.modules[layer].forward(shaped, *map(value, args), **{name: value(source) for name, source in kwargs.items()})
        return next(out for out in output if not out.is_floating_point())

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._ids = kwargs.get("input_ids", args[0] if args else None)

    def _called(self, layer: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not args:  # states by keyword
                first = next(iter(kwargs))
                args, kwargs = (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
            call = RouterCall(args, kwargs, tuple(output), self._ids)
            self.last = (layer, call)
            if self._calls is not None:
                self._calls.setdefault(layer, call)

        return keep


_MISSING = object()


@dataclass(frozen=True)
class _Constant:
    """A weight of the model, or no tensor at all."""

    value: Any

    def of(self, before: RouterCall | None, ids: Tensor | None) -> Any:
        return self.value


@dataclass(frozen=True)
class _Handed:
    """An output of the router before; without one, None: the first router of a model has none either."""

    index: int

    def of(self, before: RouterCall | None, ids: Tensor | None) -> Any:
        return before.output[self.index] if before is not None else None


class _TokenIds:
    """The ids of the running forward."""

    def of(self, before: RouterCall | None, ids: Tensor | None) -> Any:
        return _MISSING if ids is None else ids


class _Unknown:
    """An activation from elsewhere: nothing to ask with."""

    def of(self, before: RouterCall | None, ids: Tensor | None) -> Any:
        return None

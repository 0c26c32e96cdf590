"""Each public name explains itself with an example that runs (the examples are run as doctests of the package)."""

from __future__ import annotations

import inspect

import specter_lab


def undocumented(holder: object, names: list[str]) -> list[str]:
    """Those of ``names`` whose own docstring has no ``>>>`` example."""
    return [name for name in names if ">>>" not in (own_docstring(getattr(holder, name)) or "")]


def own_docstring(thing: object) -> str | None:
    """A class's own text, not its parent's; a plain value has none."""
    if inspect.isclass(thing):
        return thing.__dict__.get("__doc__")
    return thing.__doc__ if inspect.ismodule(thing) or inspect.isroutine(thing) else None


def test_the_package_has_public_names() -> None:
    assert len(specter_lab.__all__) > 0
    assert len(set(specter_lab.__all__)) == len(specter_lab.__all__)
    assert [name for name in specter_lab.__all__ if not hasattr(specter_lab, name)] == []


def test_each_public_name_has_an_example() -> None:
    assert undocumented(specter_lab, [name for name in specter_lab.__all__ if name != "__version__"]) == []


def test_a_name_without_an_example_is_seen() -> None:
    class Parent:
        """>>> 1"""

    class Child(Parent):
        pass

    class Holder:
        good, child, value = Parent, Child, 3

        def bare(self) -> None: ...

    assert undocumented(Holder, ["good", "child", "value", "bare"]) == ["child", "value", "bare"]

"""What the reference shows of attributes: of `attrs.field(...)` its default, and nothing that only `__init__` sets."""

from __future__ import annotations

from typing import Any

import griffe


class Fields(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        for name, member in tuple(cls.members.items()):
            if isinstance(member, griffe.Attribute):
                if is_inner(member):
                    cls.del_member(name)
                elif str(member.value).startswith("attrs.field("):
                    member.value = default_of(member.value)


def is_inner(attribute: griffe.Attribute) -> bool:
    """Whether it is set in a method, and nothing says what it is for."""
    set_later = attribute.value is not None and "class-attribute" not in attribute.labels
    return set_later and attribute.docstring is None


def default_of(call: Any) -> Any:
    for argument in call.arguments:
        if isinstance(argument, griffe.ExprKeyword) and argument.name == "default":
            return argument.value
    return None

"""Classes created at run time that replace the forward of a module. The module remains the same object."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import nn


class ReplacedForward:
    """Base class of the classes that replace the forward method of a module. `create_replacing_class` combines such a
    class with the module's class.

    Modules of the combined class can be copied and pickled.
    """

    class_name_prefix: ClassVar[str]  # of the combined classes
    forward_class: type[ReplacedForward]
    plain_class: type[nn.Module]  # the class of the module before the change

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        # pickle cannot import a class created at run time.
        return _restore_module, (self.forward_class, self.plain_class), self.__getstate__()


@functools.cache
def create_replacing_class(forward_class: Any, plain_class: Any) -> Any:
    """Return a common subclass of `forward_class`, which is a subclass of ReplacedForward, and `plain_class`, which is
    the class of a module."""
    return type(
        f"{forward_class.class_name_prefix}{plain_class.__name__}",
        (forward_class, plain_class),
        {"forward_class": forward_class, "plain_class": plain_class},
    )


def _restore_module(forward_class: Any, plain_class: Any) -> Any:
    replacing_class = create_replacing_class(forward_class, plain_class)
    return replacing_class.__new__(replacing_class)

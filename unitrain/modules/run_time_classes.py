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
def create_replacing_class(forward: Any, plain_class: Any) -> Any:
    """Return the common subclass of `forward`, a subclass of ReplacedForward, and `plain_class`, the class of a
    module."""
    return type(
        f"{forward.class_name_prefix}{plain_class.__name__}",
        (forward, plain_class),
        {"forward_class": forward, "plain_class": plain_class},
    )


def _restore_module(forward: Any, plain_class: Any) -> Any:
    kind = create_replacing_class(forward, plain_class)
    return kind.__new__(kind)

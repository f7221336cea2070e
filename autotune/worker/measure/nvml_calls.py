"""Calls of NVML, any of which may be refused: not supported, no permission, or lacking in this driver or pynvml.

Takes a function's name and arguments; hands on its answer, or None. Nothing else in the worker knows pynvml.
Source: NVML API reference; function names as in nvidia-ml-py's pynvml.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ask", "does", "number", "structure"]

_REFUSED = object()
_OLDER_NAMES = {
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",  # before driver 535
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature",  # before CUDA 12.8
}


def number(name: str, *arguments: Any) -> int | None:
    """The answer as a whole number, by the function's older name where the newer is refused; None where both are."""
    answer = ask(name, *arguments)
    if answer is None and name in _OLDER_NAMES:
        answer = ask(_OLDER_NAMES[name], *arguments)
    return None if answer is None else int(answer)


def ask(name: str, *arguments: Any) -> Any:
    """The answer of one of pynvml's functions; None where it refuses."""
    answer = _call(name, *arguments)
    return None if answer is _REFUSED else answer


def does(name: str, *arguments: Any) -> bool:
    """Whether one of pynvml's functions succeeded."""
    return _call(name, *arguments) is not _REFUSED


def structure(name: str) -> Any:
    """An empty one of pynvml's structures."""
    import pynvml

    return getattr(pynvml, name)()


def _call(name: str, *arguments: Any) -> Any:
    """The one place where NVML may refuse: by its answer, by lacking a function, or since an argument was refused."""
    import pynvml

    function = getattr(pynvml, name, None)
    if function is None or any(argument is None for argument in arguments):
        return _REFUSED
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return _REFUSED

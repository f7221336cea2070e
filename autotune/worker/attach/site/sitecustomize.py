"""Stands first on the PYTHONPATH of what a command starts: attaches, then runs the sitecustomize behind it, if any.

Source: Python's documentation of the module site. It must never keep a Python process from starting.
"""

import os
import sys

_own = os.path.dirname(os.path.abspath(__file__))

if "AUTOTUNE_ATTACH" in os.environ:
    try:
        from autotune.worker.attach.bootstrap import begin

        begin()
    except Exception as error:  # noqa: BLE001 - another interpreter than autotune's, or a folder that is gone
        sys.stderr.write(f"autotune: could not attach to this process: {type(error).__name__}: {error}\n")

for _entry in sys.path:
    _file = os.path.join(_entry, "sitecustomize.py")
    if os.path.abspath(_entry or os.getcwd()) != _own and os.path.isfile(_file):
        with open(_file, "rb") as _source:
            exec(compile(_source.read(), _file, "exec"), {"__name__": "sitecustomize", "__file__": _file})  # noqa: S102
        break

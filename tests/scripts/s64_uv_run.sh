# `uv run` in the active environment, as a shell that has activated it would start it.
export VIRTUAL_ENV="$(python -c 'import sys; print(sys.prefix)')"
exec uv run --no-project --active s64_uv_run.py

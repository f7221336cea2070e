"""Files for people: configurations in, recommended.yaml out and in, the run folder.

Comes in: YAML files with their overrides, other frameworks' own files, the arguments of a Python
call, a finished search's summary. Goes out: a Plan or a TrainingConfig, else a ConfigError with
every problem, each with its line, rule, value and remedy; the files of a run folder; and a digest
of the user's own source files. `yaml_document` knows YAML and places, `plan_file` reads plans and
other frameworks' files, `recommended` writes and reads recommended.yaml, `script_patch` writes
recommended.patch, `run_folder` names and locks a run's files.
"""

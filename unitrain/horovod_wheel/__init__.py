"""Build Horovod 0.28.1 as a wheel for the installed torch, cache it, and check the installed Horovod.

machine       detect the compilers and libraries of this machine
requirements  list the missing build requirements, each with a fix
plan          create a build plan (plain data) for a request and a machine
patches       the patches for the Horovod sources, as unified diffs, and the function that applies them
build         execute a build plan
check         report the capabilities and problems of the installed Horovod

The entry points `machine.detect`, `plan.cache_folder`, `build.run` and `check.inspect` receive the environment as a
mapping. By default, `check.inspect` uses the environment of this process.
"""

__all__ = ["build", "check", "machine", "patches", "plan"]

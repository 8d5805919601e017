"""How often each process of a server registers the backend: an import hook in every one of them writes it down."""

import os
from collections import Counter
from pathlib import Path

HOOK = """
import importlib.abc
import importlib.machinery
import os
import sys


class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.layers.attention.attention_registry":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def watched(module):
            execute(module)
            register = module.register_attention_backend

            def counted(backend):
                if backend == "locks":
                    with open(os.environ["REGISTRATIONS"], "a") as out:
                        out.write(f"{os.getpid()}\\n")
                return register(backend)

            module.register_attention_backend = counted

        spec.loader.exec_module = watched
        return spec


sys.meta_path.insert(0, Watch())
"""


def watching(folder: Path) -> dict[str, str]:
    """Variables in which Python programs write every registration into a file of this folder."""
    (folder / "sitecustomize.py").write_text(HOOK)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "REGISTRATIONS": str(folder / "registrations")}


def assert_registered_once(folder: Path) -> None:
    """The launching process and the scheduler at least have registered the backend, and every process that did did so once."""
    times = Counter((folder / "registrations").read_text().split())
    assert len(times) >= 2
    assert set(times.values()) == {1}, times

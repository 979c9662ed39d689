"""`python -m bench [NAME ...]`: run the benchmarks, all of them or those named. Each prints a table of medians."""

import importlib
import pkgutil
import sys

import bench

names = sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))


def main() -> None:
    chosen = sys.argv[1:] or names
    unknown = set(chosen) - set(names)
    if unknown:
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for name in chosen:
        print(f"\n== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main([])


if __name__ == "__main__":
    main()

"""The peers that the benchmarks compare with shardproof, with their adapters.

Each adapter is a `Way`: it saves and loads the same `Subject` as all others. It names the release that it
drives, whether that flushes its files, and how its use here differs from its documentation. `every_way`
lists all ways. A way whose package is missing or does not start is listed with its error.
"""

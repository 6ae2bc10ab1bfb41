"""The peers that the benchmarks measure beside shardproof, one adapter a module.

Each adapter is a `Way`: it saves and loads one and the same `Subject`, says which release it drives,
whether it flushes what it wrote, and how far from its usual use it is driven. `every_way` lists them all;
one whose package is missing or does not start here is listed with its error.
"""

"""The read-once exchange: one rank reads a chunk that several ranks want, and the others receive it."""

"""Reading once: one rank reads what several want, and hands it to the others."""

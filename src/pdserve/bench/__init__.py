"""``pdserve bench``: what a service or an engine does, measured, against what this machine could do.

One module for each subcommand (`latency`, `throughput`, `serve`, `sweep`, `compare`, `floors`, `handoff`), each with
a ``run(argv) -> exit status``, and below them, from the bottom:

- `measure`: what one request or one machine gave, and the arithmetic over many of them;
- `workload`: which prompts, how long, arriving when;
- `client`: sends them over HTTP and notes each token's arrival;
- `transfers`: engines without models, that only hand KV over;
- `servers`: starts what is to be measured, pinned to the same cores;
- `show`: tables, JSON and plots.

Exit status 0: all requests were answered whole. 1: some were lost; how many and why is printed. 2: a setting is
wrong, or there is nothing to measure.
"""

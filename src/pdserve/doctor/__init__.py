"""What ``pdserve doctor`` looks at, and what it thinks of it.

    facts.py      what was found out, as plain values
    probe.py      asks instances and routers
    findings.py   one thing that is wrong, and what to do
    pools.py      checks of processes and models
    hand_offs.py  checks of the KV's way
    machines.py   checks of clocks, memory and disks
    checks.py     all checks, by name

A check is a function from `facts.Deployment` to findings: it asks nobody.
"""

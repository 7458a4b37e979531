"""Parts that connectors share: a store of blocks needs only to know how its own medium reads, writes and looks up.

    store.py          what a store is to these parts: `BlockIndex` (lookups) and `BlockStore` (reads and writes)
    scheduler.py      the half beside the scheduler, for any store
    worker.py         the half beside the model runner, for any store; composes:
      loads.py          store → KV memory, on reader threads
      saves.py          KV memory → staging → store, on writer threads
      drafts.py         the same beside the forward pass, a few layers at a time
    asked_index.py    lookups in a store that has to be asked, beside the scheduler's thread
    block_format.py   a stored block: header, checksum, verification
    block_memory.py   KV memory as bytes
    messages.py       what the two halves say to each other
    task_threads.py   reader and writer threads; cores.py: on which cores they wake
    read_pace.py      how fast reads go on beside a forward pass
    staging.py, failures.py, options.py

Connectors that are no stores take the parts one by one. Nothing here knows of files, servers or peers.
"""

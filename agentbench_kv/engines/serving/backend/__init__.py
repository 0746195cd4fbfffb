"""What runs inside a serving engine's own process, the same for every such engine.

`policy` says what to do, `ledger` decides when and to which length (scheduler side), `rows` selects
and moves rows (worker side), `orders` is what the first tells the second, `control` answers the
harness. Nothing here imports a serving engine.
"""

"""The slice ledger: where every chip-second of the fleet went, and what it cost."""

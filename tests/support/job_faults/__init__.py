"""Jobs of real processes that go wrong: ``campaign`` chooses the fault, ``ranks`` runs the
processes, ``engine`` is how they reach each other, ``judge`` says what must have come of it.
"""

"""`Adapter`: one loading of a LoRA adapter, as requests have it.

`resources/adapters.py` owns it and is the only one that changes it; a request keeps the one that it named at its
arrival, whatever is loaded under that name later.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Adapter:
    """One loading of an adapter.

    Attributes:
      number: of the loading; never used again.
      name, folder, rank, pinned, alias: see `LoadAdapter`.
      digest: of what was read, equal on servers that have read the same.
      loading: stands for this loading in namespaces; unlike that of any other server.
      num_requests: samples that have it and have not ended.
      num_admitted: of those, the ones that hold a row.
      place: its small number on the device, 0 while it isn't there.
      last_used: counts uses; the order of them is all that matters.
    """

    number: int
    name: str
    folder: str
    rank: int
    pinned: bool
    digest: str = ""
    alias: str = ""
    loading: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_requests: int = 0
    num_admitted: int = 0
    place: int = 0
    last_used: int = 0

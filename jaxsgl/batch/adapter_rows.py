"""`AdapterRows`: which adapter each row's request has, and which columns of the device's pool each adapter has.

Adapters have small numbers here, 1 up to the most that may be on the device; 0 is none. The scheduler writes it
(`scheduler/resources/adapters.py`), `build.py` reads it. Knows no names, no requests and no weights.
"""

from __future__ import annotations

import numpy as np

from jaxsgl.cache.pages import IntArray


class AdapterRows:
    """Adapters by row and by column.

    Attributes:
      number_of_row: `[rows + 1]` int32; 0 for a row without an adapter, and for the dummy row.
      column_owners: `[columns]` int32, the number of the adapter that has each column; 0 if it is free.
    """

    def __init__(self, num_rows: int, max_adapters: int, num_columns: int) -> None:
        self.number_of_row: IntArray = np.zeros(num_rows + 1, np.int32)
        self.column_owners: IntArray = np.zeros(num_columns, np.int32)
        self._reach: IntArray = np.zeros(max_adapters + 1, np.int32)

    def columns_of(self, rows: IntArray) -> int:
        """Columns up to the last one that an adapter of `rows` has; 0 if none of them has an adapter."""
        return int(self._reach[self.number_of_row[rows]].max(initial=0))

    def place(self, number: int, rank: int) -> tuple[int, ...]:
        """Gives adapter `number` the first free columns; asserts that there are `rank`."""
        columns = np.flatnonzero(self.column_owners == 0)[:rank]
        assert len(columns) == rank and not (self.column_owners == number).any(), "the pool is full"
        self.column_owners[columns] = number
        self._reach[number] = columns[-1] + 1
        return tuple(columns.tolist())

    def remove(self, number: int) -> None:
        """Frees the columns of adapter `number`."""
        assert not (self.number_of_row == number).any(), "a row has the adapter still"
        self.column_owners[self.column_owners == number] = 0
        self._reach[number] = 0

    def set_row(self, row: int, number: int) -> None:
        """Gives `row` the adapter `number`, 0 for none."""
        self.number_of_row[row] = number

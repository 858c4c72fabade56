"""What is remembered of what others have sent or done: so much of it, and no more, however long a run is."""

from collections import OrderedDict
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(OrderedDict[_Key, _Value]):
    """The `limit` keys that were set last. A key that is set anew is remembered as long as a new one.

    To read is not to set: who wants what is used to be kept sets it again.
    """

    def __init__(self, limit: int) -> None:
        assert limit > 0, limit
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)

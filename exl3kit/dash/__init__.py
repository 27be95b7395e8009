"""The page of `kit dash`: one gatherer asks every node while somebody looks, one server shows what it found."""

"""What every part of fencepost agrees on: identities, envelope, digest, and the database contract."""

"""An engine and an HTTP server on the runtime: reference code, and what the demo and the tests serve with."""

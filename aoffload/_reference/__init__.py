"""A reference engine and HTTP server on the runtime. The demo and the tests serve with them."""

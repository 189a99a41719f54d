//! Private servers, upstreams and clients for tests.

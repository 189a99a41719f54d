//! The one case list that every store must pass.

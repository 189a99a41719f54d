//! The engine: claims, heartbeats, waiters, replays.

//! Handlers: a command, an HTTP service, statements of SQL.

mod exec;
#[cfg(feature = "http")]
mod http;
mod response;
mod sql;

pub use exec::Exec;
#[cfg(feature = "http")]
pub use http::{Http, HttpUrl, InvalidUrl};
pub use response::RESPONSE_BYTES_MAX;
pub use sql::Sql;

//! The corpus: what clients send and services answer, the usual and the odd.

mod exchanges;
mod replies;
mod requests;

use crate::case::Case;

/// Every case of HTTP/1.1, with the name of its group.
pub(crate) fn cases() -> Vec<(&'static str, Vec<Case>)> {
    vec![
        ("methods", requests::methods()),
        ("targets", requests::targets()),
        ("request headers", requests::headers()),
        ("hosts", requests::hosts()),
        ("request bodies", requests::bodies()),
        ("statuses", replies::statuses()),
        ("reply headers", replies::headers()),
        ("reply bodies", replies::bodies()),
        ("broken replies", replies::broken()),
        ("interim answers", exchanges::interim()),
        ("connections", exchanges::connections()),
        ("conditions, ranges, compression", exchanges::representations()),
        ("CORS", exchanges::cors()),
        ("streams", exchanges::streams()),
        ("WebSocket", exchanges::websocket()),
        ("guarded", exchanges::guarded()),
    ]
}

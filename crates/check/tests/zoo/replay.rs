//! What stores, and clients of stores, make of an answer that comes again.

use std::collections::HashMap;

use serde_json::Value;

use crate::defect::Defect;
use crate::nature::Nature;
use crate::wire::Reply;

pub(crate) fn marked(reply: Reply) -> Reply {
    reply.header("idempotency-replayed", "true")
}

/// What a bad store makes of an answer.
pub(crate) fn changed(mut reply: Reply, nature: Nature) -> Reply {
    match nature.defect {
        Some(Defect::ReplayIs200) => reply.status = 200,
        Some(Defect::HeadersLost) => reply.headers.retain(|(name, _)| name == "content-type"),
        Some(Defect::LocationLost) => reply = reply.without("location"),
        Some(Defect::RepeatedCollapsed) => {
            let last: HashMap<_, _> = reply.headers.into_iter().collect();
            reply.headers = last.into_iter().collect();
        }
        Some(Defect::EncodingLost) => reply = reply.without("content-encoding"),
        Some(Defect::TextDecoded) => reply.body = String::from_utf8_lossy(&reply.body).into_owned().into(),
        Some(Defect::JsonRewritten) => {
            if let Ok(json) = serde_json::from_slice::<Value>(&reply.body) {
                reply.body = json.to_string().into();
            }
        }
        Some(Defect::ReplayTruncated) => reply.body.truncate(16),
        _ => {}
    }
    reply
}

/// The stored answer with the balance of now.
pub(crate) fn with_balance(mut reply: Reply, now: u64) -> Reply {
    if let Ok(mut body) = serde_json::from_slice::<Value>(&reply.body)
        && !body["balance"].is_null()
    {
        let (id, charged) = (body["id"].take(), body["charged"].take());
        reply.body = format!(r#"{{"id":{id},"charged":{charged}, "balance":{now}}}"#).into();
    }
    reply
}

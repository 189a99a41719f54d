//! What a store says of itself.

use std::time::Duration;

use onlyonce_core::Reply;

use crate::harness::{answered, fresh_token};
use crate::{Expiry, Harness};

/// Every handle says the same; the name is short and lower case; what is not durable names its hazard.
pub async fn the_store_says_what_it_is(h: &Harness) {
    let capabilities = h.store().capabilities();
    for store in h.handles(2).await {
        assert_eq!(store.capabilities(), capabilities);
    }
    let name = capabilities.name;
    assert!(
        !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    );
    assert!(!capabilities.location.is_empty());
    assert!(capabilities.durable || capabilities.hazard.is_some(), "what does a crash lose?");
}

/// A store that is purged keeps what has expired until then; a store that drops by itself has nothing to purge. The
/// subject declared which it is.
pub async fn the_declared_way_of_expiry_is_the_real_one(h: &Harness) {
    let (operation, owner) = (h.operation("k"), fresh_token());
    h.acquire(&operation, owner).await;
    h.finish(&operation, owner, Reply::ok("old")).await;
    h.advance(h.retention()).await;
    if let Some(admin) = h.admin_if_any() {
        let shown = answered(admin.show(operation.id()).await);
        assert_eq!(shown.is_some(), h.expiry() == Expiry::ByPurge, "{shown:?}");
    }
    let removed = h.purge(10, Duration::ZERO).await.removed;
    assert_eq!(removed, u64::from(h.expiry() == Expiry::ByPurge));
}

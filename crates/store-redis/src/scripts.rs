//! The scripts. Each is sent by its hash, and loaded where the server does not know it.

use std::sync::LazyLock;

use redis::Script;

/// A script that can be sent.
pub(crate) struct Text {
    pub(crate) code: &'static str,
    script: Script,
}

impl Text {
    fn new(code: &'static str) -> Self {
        Self { code, script: Script::new(code) }
    }

    pub(crate) fn hash(&self) -> &str {
        self.script.get_hash()
    }
}

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static str> {
    [&LOOK, &SWAP, &TOUCH, &COMPLETE_MANY, &COMPLETE, &RENEW, &MARK, &RELEASE]
        .into_iter()
        .map(|text| text.code)
}

/// What every script of an owner begins with. Completions, marks, renewals and releases are taken when memory is full
/// too: what they are about was let in before.
macro_rules! owner {
    ($file:literal) => {
        concat!("#!lua flags=allow-oom\n", include_str!("lua/owner.lua"), include_str!($file))
    };
}

pub(crate) static LOOK: LazyLock<Text> = LazyLock::new(|| Text::new(include_str!("lua/look.lua")));
pub(crate) static SWAP: LazyLock<Text> = LazyLock::new(|| Text::new(include_str!("lua/swap.lua")));
pub(crate) static TOUCH: LazyLock<Text> = LazyLock::new(|| Text::new(include_str!("lua/touch.lua")));
pub(crate) static COMPLETE_MANY: LazyLock<Text> =
    LazyLock::new(|| Text::new(include_str!("lua/complete_many.lua")));
pub(crate) static COMPLETE: LazyLock<Text> = LazyLock::new(|| Text::new(owner!("lua/complete.lua")));
pub(crate) static RENEW: LazyLock<Text> = LazyLock::new(|| Text::new(owner!("lua/renew.lua")));
pub(crate) static MARK: LazyLock<Text> = LazyLock::new(|| Text::new(owner!("lua/mark.lua")));
pub(crate) static RELEASE: LazyLock<Text> = LazyLock::new(|| Text::new(owner!("lua/release.lua")));

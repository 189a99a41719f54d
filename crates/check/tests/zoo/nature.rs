//! What makes one server of the zoo different from another: a defect, or another right design.

use crate::defect::Defect;

/// An enum and the list of all its variants.
macro_rules! breeds {
    ($($(#[doc = $what:literal])+ $name:ident,)+) => {
        /// A right design. The checker must find nothing wrong with any of them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub(crate) enum Breed {
            /// Answers by itself, refuses a copy in flight, problem documents, marker, expiry.
            #[default]
            Plain,
            $($(#[doc = $what])+ $name,)+
        }

        impl Breed {
            pub(crate) const ALL: &[Self] = &[Self::Plain, $(Self::$name,)+];
        }
    };
}

breeds! {
    /// A copy in flight waits for the answer.
    Waits,
    /// A copy in flight is told 425.
    TooEarly,
    /// Takes the order with a 202, and works later.
    Accepts,
    /// Answers with a 303 to the receipt.
    SeeOther,
    /// Keys are UUIDs.
    UuidKeys,
    /// Wants credentials, and refuses to talk to anybody else.
    Auth,
    /// A connection has one request.
    Closes,
    /// Takes more than a second for everything.
    Slow,
    /// The work ends with the connection; nothing of it stays.
    Cancels,
    /// Keys are optional and in any spelling, another body is a 400, server errors are stored.
    Stripe,
    /// A request without a key runs.
    OptionalKey,
    /// Says what must be said, and no more: no marker, no problem documents, no expiry, no Retry-After.
    Terse,
    /// Headers that differ in every answer, replayed or not.
    Volatile,
    /// So many requests a second, and then 429.
    RateLimited,
    /// Cannot serve anybody for a moment now and then, and says when to come back: 503.
    StandsStill,
    /// The effect is seen some time after the answer.
    LateEffect,
    /// The same answer for every payment.
    Silent,
    /// Keys of each method and path are apart.
    PerPlace,
    /// An order number, in the body, may be used once, whatever the key.
    UniqueOrders,
    /// A key is the header's value as it came: quotes are a part of it.
    QuotesInKey,
    /// After a crash in the middle says that it does not know, and that trying again is of no use.
    UnknownAfterCrash,
}

/// What a server is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Nature {
    pub(crate) defect: Option<Defect>,
    pub(crate) breed: Breed,
}

impl Nature {
    pub(crate) fn has(self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }

    pub(crate) fn is(self, breed: Breed) -> bool {
        self.breed == breed
    }

    /// As it is given to another process.
    pub(crate) fn name(self) -> String {
        format!("{self:?}")
    }

    /// Back from its name.
    pub(crate) fn named(name: &str) -> Self {
        let defects = Defect::ALL.iter().map(|&defect| Self::from(defect));
        let breeds = Breed::ALL.iter().map(|&breed| Self::from(breed));
        defects.chain(breeds).find(|nature| nature.name() == name).expect("a nature")
    }
}

impl From<Defect> for Nature {
    fn from(defect: Defect) -> Self {
        Self { defect: Some(defect), breed: Breed::Plain }
    }
}

impl From<Breed> for Nature {
    fn from(breed: Breed) -> Self {
        Self { defect: None, breed }
    }
}

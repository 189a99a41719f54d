//! Why a trial could not be carried to its end.

use crate::wire::{Exhausted, NoAnswer};

/// What ends a trial early.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Stop {
    /// A limit of the run.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// The API gave no answer where it had to give one.
    #[error(transparent)]
    Silent(#[from] NoAnswer),
    /// The URL of the effect gave no answer.
    #[error("the effect URL: {0}")]
    Unseen(#[source] NoAnswer),
    /// The effect could not be read.
    #[error("{0}")]
    Probe(String),
    /// What the trial rests on is not so with this API: the text says why.
    #[error("{0}")]
    Unfit(String),
    /// The option that the trial needs was not given.
    #[error("{0}")]
    Missing(String),
}

impl Stop {
    /// Whether there was no answer at all.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unseen(_))
    }
}

/// The steps of a trial.
pub(crate) type Step<T> = Result<T, Stop>;

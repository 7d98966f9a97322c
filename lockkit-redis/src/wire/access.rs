//! What this user may do, and what the server can do: found out by trying, under names that no lock can have, with
//! requests that change nothing.
//!
//! `ACL DRYRUN` would tell as much, but only to an administrator, and not of commands that were renamed.

use lockkit_core::{ErrorKind, Finding, Token};
use redis::{Pipeline, Value};

use crate::wire::{
    error::{self, Sent},
    name::{self, Names},
    scripts::INSPECT,
};

/// Names for trying things out.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) key: String,
    pub(crate) counter: String,
    prefix: String,
    /// The user that logs in, for advice.
    pub(crate) user: &'a str,
}

impl<'a> Subject<'a> {
    /// `token` makes the names new. `slots` are those of a member of a cluster that the names have to lie in, first and last; any if
    /// there are none.
    pub(crate) fn new(names: &Names, token: &Token, username: Option<&'a str>, slots: &[(u16, u16)]) -> Self {
        let token = token.reveal();
        let is_in = |key: &String| slots.iter().any(|(first, last)| (*first..=*last).contains(&name::slot(key)));
        let mut keys = (0_u32..).map(|n| names.reserved(&format!("doctor-{token}-{n}")));
        let key = keys.find(|key| slots.is_empty() || is_in(key)).unwrap_or_default();
        let (counter, prefix) = (name::counter(&key), names.prefix().to_owned());
        Self { key, counter, prefix, user: username.unwrap_or("default") }
    }

    /// What is worth trying on every connection: to run a script on a lock's keys, and to use its channel.
    pub(crate) fn basics(&self) -> Pipeline {
        let mut script = INSPECT.by_hash(2, 0, self.key.len() + self.counter.len());
        script.arg(&self.key).arg(&self.counter);
        let mut requests = Pipeline::with_capacity(2);
        requests.add_command(script).cmd("PUBLISH").arg(&self.key).arg("");
        requests
    }

    /// Judges the replies to [`basics`](Self::basics).
    pub(crate) fn judge_basics(&self, replies: Vec<Value>) -> Vec<Finding> {
        let mut replies = replies.into_iter().map(refusal);
        let script = replies.next().flatten().and_then(|refusal| self.judge_script(&refusal));
        let channel = replies.next().flatten().filter(Refusal::is_lasting);
        let channel = channel.map(|refusal| self.judge_channels(&["publish"], &refusal));
        script.into_iter().chain(channel).collect()
    }

    pub(crate) fn judge_script(&self, refusal: &Refusal) -> Option<Finding> {
        match refusal {
            Refusal::Denied(why) => {
                let (user, prefix) = (self.user, &self.prefix);
                let rule = format!("ACL SETUSER {user} +eval +evalsha ~{prefix}* ~{{{prefix}*");
                let advice = format!("{rule}: every operation is a script");
                let summary = format!("the user may not run scripts on the keys of locks ({why})");
                Some(Finding::error(ErrorKind::Denied, "scripts", summary, advice))
            }
            Refusal::Unknown(why) => {
                let advice = "undo the renaming of EVAL and EVALSHA: every operation is a script";
                let summary = format!("the server does not run scripts ({why})");
                Some(Finding::error(ErrorKind::Unsupported, "scripts", summary, advice))
            }
            Refusal::Other(_) => None,
        }
    }

    /// The user may not use channels in all the ways that waiting takes.
    pub(crate) fn judge_channels(&self, commands: &[&str], refusal: &Refusal) -> Finding {
        let effect = match commands {
            ["publish"] => "a release wakes nobody, so that waiters only ask now and then",
            ["unsubscribe"] => "channels that nobody listens to any more pile up",
            _ => "with this login nobody can wait for a lock",
        };
        let summary = format!("{} is refused ({}): {effect}", commands.join(", "), refusal.why());
        let advice = format!("ACL SETUSER {} +publish +subscribe +unsubscribe &{}*", self.user, self.prefix);
        Finding::warning("channels", summary, advice)
    }
}

/// Why the server did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The user lacks a permission.
    Denied(String),
    /// There is no such command.
    Unknown(String),
    /// Something else, possibly for now.
    Other(String),
}

impl Refusal {
    /// Whether it is the user or the server that lacks something. A member of a cluster also refuses what another serves.
    pub(crate) fn is_lasting(&self) -> bool {
        !matches!(self, Self::Other(_))
    }

    pub(crate) fn why(&self) -> &str {
        let (Self::Denied(why) | Self::Unknown(why) | Self::Other(why)) = self;
        why
    }
}

/// The refusal in a reply, if it is one.
pub(crate) fn refusal(reply: Value) -> Option<Refusal> {
    let Value::ServerError(e) = reply else { return None };
    let error = error::map(&e.into(), Sent::ReadOnly);
    let why = error.message().to_owned();
    Some(match error.kind() {
        ErrorKind::Denied => Refusal::Denied(why),
        ErrorKind::Unsupported if why.contains("unknown command") => Refusal::Unknown(why),
        _ => Refusal::Other(why),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_lock_has_the_names() {
        for prefix in ["", "lockkit:", "a%7B"] {
            let names = Names::new(prefix).expect("prefix");
            let subject = Subject::new(&names, &Token::random().expect("random"), None, &[]);
            assert!(subject.key.starts_with(prefix));
            assert_eq!(names.name(subject.key.as_bytes()), None, "{}", subject.key);
            assert_eq!(names.name(subject.counter.as_bytes()), None, "{}", subject.counter);
        }
    }
}

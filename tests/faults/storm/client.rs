//! The way to the [`Register`](super::Register), and to the history: what one task of a worker asks and hears.

use std::{io, net::SocketAddr};

use lockkit::{Guard, Mode, Outcome, Status};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use lockkit_testkit::{
    BoxError,
    history::{Recorder, What},
};

/// A connection to the register, for one task: it asks one thing after the other.
pub(crate) struct Client {
    name: String,
    answers: Lines<BufReader<OwnedReadHalf>>,
    questions: OwnedWriteHalf,
}

impl Client {
    pub(crate) async fn connect(register: SocketAddr, name: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(register).await?;
        stream.set_nodelay(true)?;
        let (from, questions) = stream.into_split();
        Ok(Self { name: name.to_owned(), answers: BufReader::new(from).lines(), questions })
    }

    /// The version of the fenced value and of its twin, whether or not the claim was admitted.
    pub(crate) async fn claim(&mut self, key: &str, fence: u64) -> Result<(u64, u64), BoxError> {
        let answer = self.ask(format!("claim {} {key} {fence}\n", self.name)).await?;
        let mut numbers = answer.split(' ').skip(1).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(version), Some(twin)) => Ok((version?, twin?)),
            _ => Err(format!("the register answered {answer:?}").into()),
        }
    }

    pub(crate) async fn pass(&mut self, key: &str, mode: Mode) -> Result<(), BoxError> {
        self.ask(format!("pass {} {key} {mode}\n", self.name)).await.map(drop)
    }

    pub(crate) async fn write(&mut self, key: &str, fence: u64, base: u64, twin: u64) -> Result<bool, BoxError> {
        Ok(self.ask(format!("write {} {key} {fence} {base} {twin}\n", self.name)).await? == "1")
    }

    async fn ask(&mut self, question: String) -> Result<String, BoxError> {
        self.questions.write_all(question.as_bytes()).await?;
        Ok(self.answers.next_line().await?.ok_or("the register hung up")?)
    }
}

/// A guard, and the operation that acquired it.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) guard: Guard,
    pub(crate) grant: u64,
}

impl Held {
    /// Asks the guard whether the lock is still held.
    pub(crate) fn ask(&self, recorder: &Recorder) -> io::Result<bool> {
        let op = recorder.ask(What::Ask { grant: self.grant })?;
        let status = self.guard.status();
        match status {
            Status::Held | Status::Suspect => recorder.hear(op, What::Held)?,
            Status::Lost(reason) => recorder.hear(op, What::Lost { reason: reason.to_string() })?,
        }
        Ok(!matches!(status, Status::Lost(_)))
    }

    pub(crate) async fn renew(&self, recorder: &Recorder) -> io::Result<()> {
        let op = recorder.ask(What::Renew { grant: self.grant })?;
        let heard = match self.guard.renew().await {
            Ok(()) => What::Held,
            Err(error) => What::Failed { error: error.to_string() },
        };
        recorder.hear(op, heard)
    }

    pub(crate) async fn release(self, recorder: &Recorder) -> io::Result<()> {
        let op = recorder.ask(What::Release { grant: self.grant })?;
        let heard = match self.guard.release().await {
            Ok(Outcome::Released) => What::Released { held: true, reason: None },
            Ok(Outcome::NotHeld(reason)) => What::Released { held: false, reason: Some(reason.to_string()) },
            Err(error) => What::Failed { error: error.to_string() },
        };
        recorder.hear(op, heard)
    }

    pub(crate) fn drop(self, recorder: &Recorder) -> io::Result<()> {
        let op = recorder.ask(What::Release { grant: self.grant })?;
        drop(self.guard);
        recorder.hear(op, What::Dropped)
    }
}

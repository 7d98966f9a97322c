//! From a URL to a store: what is understood, and what is said of the rest.

use lockkit::{ErrorKind, connect, open};

async fn refused(url: &str) -> (ErrorKind, String) {
    let error = open(url).await.err().unwrap_or_else(|| panic!("{url} was accepted"));
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    (error.kind(), text)
}

#[tokio::test]
async fn memory_needs_no_feature() -> lockkit::Result<()> {
    let locker = connect("memory:").await?;
    assert_eq!(locker.info().scheme, "memory");
    assert!(connect("memory:").await?.lock("x").try_acquire().await?.is_some());
    Ok(())
}

#[tokio::test]
async fn memory_takes_the_option_of_every_url() -> lockkit::Result<()> {
    let guard = lockkit::connect("memory:?fence_above=5").await?.lock("a").acquire().await?;
    assert!(guard.fence() > lockkit::Fence::new(5));
    Ok(())
}

#[tokio::test]
async fn what_is_no_store_is_refused_with_advice() {
    for (url, advice) in [
        ("", "memory:"),
        ("localhost", "redis://"),
        ("memory:somewhere", "memory:"),
        ("etcd://localhost", "redis://"),
        ("redi://localhost", "redis://"),
    ] {
        let (kind, text) = refused(url).await;
        assert_eq!(kind, ErrorKind::InvalidInput, "{text}");
        assert!(text.contains(advice), "{text}");
    }
}

#[cfg(not(feature = "redis"))]
#[tokio::test]
async fn a_feature_that_is_off_is_named() {
    let (kind, text) = refused("redis://localhost").await;
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(text.contains("feature `redis`"), "{text}");
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_redis_url_is_checked_before_anything_is_sent() {
    for url in [
        "redis://",
        "redis://localhost:99999",
        "redis://localhost/not-a-number",
        "redis://localhost/0?colour=blue",
        "redis://localhost/0?timeout=soon",
        "redis://user:secret@local host",
    ] {
        let (kind, text) = refused(url).await;
        assert_eq!(kind, ErrorKind::InvalidInput, "{url}: {text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_server_that_is_down_is_unavailable() {
    // Port 1 of the loopback interface is not served by anyone.
    let (kind, text) = refused("redis://:secret@127.0.0.1:1").await;
    assert_eq!(kind, ErrorKind::Unavailable, "{text}");
    assert!(text.contains("127.0.0.1") && !text.contains("secret"), "{text}");
}

#[cfg(feature = "redlock")]
#[tokio::test]
async fn a_redlock_url_is_checked_before_anything_is_sent() {
    for (url, advice) in [
        ("redlock://", "no host"),
        ("redlock://a,b,c?colour=blue", "node_timeout"),
        ("redlock://user:secret@a,b,c?durable=perhaps", "yes or no"),
        ("redlock://user:secret@a,b,c/not-a-number", "database"),
    ] {
        let (kind, text) = refused(url).await;
        assert_eq!(kind, ErrorKind::InvalidInput, "{url}: {text}");
        assert!(text.contains(advice) && !text.contains("secret"), "{text}");
    }
}

#[cfg(feature = "doctor")]
#[tokio::test]
async fn a_diagnosis_understands_the_same_urls() -> lockkit::Result<()> {
    let findings = lockkit::diagnose("memory:").await?;
    assert_eq!(findings.iter().map(|finding| finding.code).collect::<Vec<_>>(), ["memory"]);
    for url in ["", "localhost", "memory:somewhere", "etcd://localhost"] {
        let error = lockkit::diagnose(url).await.expect_err(url);
        assert_eq!((error.kind(), error.to_string()), refused(url).await);
    }
    Ok(())
}

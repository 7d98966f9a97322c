// A worker of a comparison whose locks are Apache Curator's InterProcessMutex.
//
// It reads its orders from standard input, a line of JSON each, and answers in the same way: worker/protocol.rs describes
// them. The orders are simple, and looked through for what they say. With an argument it tells Curator's version instead.

import java.io.*;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.regex.*;
import org.apache.curator.framework.*;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class CuratorPeer {
    // The virtual machine compiles what runs often: before that it is many times as slow.
    private static final long WARM_UP = 1_000_000_000L;
    // How long after the order all workers start. The moment itself is told on a clock that Java has not.
    private static final long NOTICE = 30_000_000L;

    private static final BufferedReader ORDERS = new BufferedReader(new InputStreamReader(System.in));

    private final String assignment;
    private final CuratorFramework client;

    private CuratorPeer(String assignment) throws Exception {
        this.assignment = assignment;
        client = CuratorFrameworkFactory.newClient(text("store"), 20000, 10000, new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = mutex("warm-up-" + ProcessHandle.current().pid());
        for (long until = System.nanoTime() + WARM_UP; System.nanoTime() < until; ) {
            mutex.acquire();
            mutex.release();
        }
    }

    public static void main(String[] arguments) {
        try {
            if (arguments.length > 0) {
                System.out.println(version());
            } else {
                new CuratorPeer(ORDERS.readLine()).work();
            }
            System.exit(0);
        } catch (Throwable error) {
            System.err.println(error);
            System.exit(1);
        }
    }

    // What Maven wrote into the archive.
    private static String version() throws IOException {
        Properties properties = new Properties();
        String path = "/META-INF/maven/org.apache.curator/curator-recipes/pom.properties";
        try (InputStream written = InterProcessMutex.class.getResourceAsStream(path)) {
            properties.load(written);
        }
        return properties.getProperty("version");
    }

    private void work() throws Exception {
        if (assignment.contains("\"Contend\"")) {
            contend();
            return;
        }
        InterProcessMutex mutex = mutex(text("key"));
        say("\"Ready\"");
        while (isTold()) {
            if (assignment.contains("\"Pairs\"")) {
                pairs(mutex);
            } else {
                takeAndGive(mutex, assignment.contains("\"Give\""));
            }
        }
        say("\"Finished\"");
    }

    private void pairs(InterProcessMutex mutex) throws Exception {
        long slice = nanos("slice"), since = System.nanoTime() + slice / 8;
        StringJoiner acquire = new StringJoiner(","), release = new StringJoiner(",");
        for (long sent; (sent = System.nanoTime()) < since + slice; ) {
            mutex.acquire();
            long acquired = System.nanoTime();
            mutex.release();
            long released = System.nanoTime();
            if (sent >= since) {
                acquire.add(Long.toString(acquired - sent));
                release.add(Long.toString(released - acquired));
            }
        }
        say("{\"Paired\":{\"acquire\":[" + acquire + "],\"release\":[" + release + "]}}");
    }

    // The moments are those of CLOCK_MONOTONIC, which all processes of the machine share.
    private void takeAndGive(InterProcessMutex mutex, boolean whenTold) throws Exception {
        mutex.acquire();
        long took = System.nanoTime();
        if (whenTold) {
            say("{\"Took\":{\"at\":" + took + "}}");
            isTold();
            long gave = System.nanoTime();
            mutex.release();
            say("{\"Gave\":{\"at\":" + gave + "}}");
        } else {
            mutex.release();
            say("{\"Took\":{\"at\":" + took + "}}");
        }
    }

    private void contend() throws Exception {
        Path file = Paths.get(text("file"));
        int tasks = Integer.parseInt(text("tasks"));
        long warmUp = nanos("warm_up"), length = nanos("length");
        say("\"Ready\"");
        ORDERS.readLine();
        long start = System.nanoTime() + NOTICE, since = start + warmUp;
        ExecutorService threads = Executors.newFixedThreadPool(tasks);
        List<Future<long[]>> running = new ArrayList<>();
        for (int task = 0; task < tasks; task++) {
            running.add(threads.submit(() -> oneTask(file, start, since, since + length)));
        }
        StringJoiner counts = new StringJoiner(",");
        long total = 0;
        for (Future<long[]> task : running) {
            counts.add(Long.toString(task.get()[0]));
            total += task.get()[1];
        }
        say("{\"Contended\":{\"counts\":[" + counts + "],\"total\":" + total + ",\"out_of_turn\":0}}");
    }

    // How often it had the lock in the time that counts, and in all.
    private long[] oneTask(Path path, long start, long since, long until) throws Exception {
        InterProcessMutex mutex = mutex(text("key"));
        long counted = 0, total = 0;
        try (FileChannel file = FileChannel.open(path, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            TimeUnit.NANOSECONDS.sleep(start - System.nanoTime());
            while (System.nanoTime() < until) {
                mutex.acquire();
                addOne(file);
                long got = System.nanoTime();
                total++;
                counted += got >= since && got < until ? 1 : 0;
                mutex.release();
            }
        }
        return new long[] {counted, total};
    }

    // The count, and the fence that there is none of: two numbers of fixed width.
    private static void addOne(FileChannel file) throws IOException {
        ByteBuffer read = ByteBuffer.allocate(20);
        file.read(read, 0);
        long count = Long.parseLong(new String(read.array())) + 1;
        file.write(ByteBuffer.wrap(String.format("%020d %020d%n", count, 0).getBytes()), 0);
    }

    private InterProcessMutex mutex(String key) {
        return new InterProcessMutex(client, "/" + key);
    }

    // Whether to do it once more. Whoever gave the orders may be gone.
    private static boolean isTold() throws IOException {
        return "true".equals(ORDERS.readLine());
    }

    private static void say(String answer) {
        System.out.println(answer);
        System.out.flush();
    }

    private String text(String member) {
        return found("\"" + member + "\":\"?([^\",}]*)").group(1);
    }

    private long nanos(String member) {
        Matcher found = found("\"" + member + "\":\\{\"secs\":(\\d+),\"nanos\":(\\d+)\\}");
        return Long.parseLong(found.group(1)) * 1_000_000_000L + Long.parseLong(found.group(2));
    }

    private Matcher found(String pattern) {
        Matcher matcher = Pattern.compile(pattern).matcher(assignment);
        if (!matcher.find()) {
            throw new IllegalArgumentException("an order without " + pattern);
        }
        return matcher;
    }
}

// Files.java - writes 64 MiB in several ways below a directory, and prints what is there afterwards.
import java.io.*;
import java.nio.*;
import java.nio.channels.FileChannel;
import java.nio.file.*;
import java.util.*;
import java.util.zip.CRC32;
import static java.nio.file.StandardOpenOption.*;

class Files {
    static final int LENGTH = 64 << 20;

    static void show(String name, Path path, byte[] expected) throws IOException {
        byte[] found = java.nio.file.Files.readAllBytes(path);
        CRC32 sum = new CRC32();
        sum.update(found);
        System.out.printf("%s %d %x %b%n", name, found.length, sum.getValue(), Arrays.equals(found, expected));
    }

    static void write(FileChannel file, ByteBuffer bytes, long at) {
        try {
            for (long done = 0; bytes.hasRemaining(); ) done += file.write(bytes, at + done);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    public static void main(String[] words) throws Exception {
        Path at = Path.of(words[0]), part = at.resolve("part"), whole = at.resolve("whole");
        byte[] data = new byte[LENGTH];
        new Random(7).nextBytes(data);
        for (int piece : new int[] {4 << 20, 1 << 20, 4096, 1000003}) {
            try (FileOutputStream file = new FileOutputStream(part.toFile())) {
                for (int from = 0; from < LENGTH; from += piece) file.write(data, from, Math.min(piece, LENGTH - from));
                file.getFD().sync();
            }
            java.nio.file.Files.move(part, whole, StandardCopyOption.ATOMIC_MOVE);
            show("written-" + piece, whole, data);
        }
        Path path = at.resolve("threads");
        FileChannel file = FileChannel.open(path, CREATE, READ, WRITE);
        ByteBuffer direct = ByteBuffer.allocateDirect(LENGTH).put(data).flip();
        List<Thread> threads = new ArrayList<>();
        for (int turn = 0; turn < 4; turn++) {
            int first = turn;
            threads.add(new Thread(() -> {
                for (int n = first; n < 32; n += 4) write(file, direct.slice(n << 21, 1 << 21), (long) n << 21);
            }));
        }
        for (Thread thread : threads) thread.start();
        for (Thread thread : threads) thread.join();
        show("threads", path, data);
        MappedByteBuffer seen = file.map(FileChannel.MapMode.READ_WRITE, 0, LENGTH);
        ByteBuffer expected = ByteBuffer.wrap(data.clone());
        for (int from = 0; from < LENGTH; from += 8 << 20) {
            seen.put(from, data, 77, 5000); expected.put(from, data, 77, 5000);
            write(file, direct.slice(0, 2 << 20), from + (3 << 20)); expected.put(from + (3 << 20), data, 0, 2 << 20);
        }
        System.out.println("mapped " + seen.equals(expected));
        show("mapped-read", path, expected.array());
    }
}

// files.go - writes 64 MiB in several ways below a directory, and prints what is there afterwards.
package main

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

const length = 64 << 20

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func create(path string) *os.File {
	file, err := os.Create(path)
	must(err)
	return file
}

func show(name, path string, expected []byte) {
	found, err := os.ReadFile(path)
	must(err)
	fmt.Printf("%s %d %x %v\n", name, len(found), crc32.ChecksumIEEE(found), bytes.Equal(found, expected))
}

func write(file *os.File, data []byte, at int64) { _, err := file.WriteAt(data, at); must(err) }

func main() {
	at := func(name string) string { return filepath.Join(os.Args[1], name) }
	data := make([]byte, length)
	for i := range data {
		data[i] = byte(uint64(i) * 0x9e3779b97f4a7c15 >> 40)
	}
	for _, piece := range []int{4 << 20, 1 << 20, 4096, 1000003} {
		file := create(at("part"))
		for from := 0; from < length; from += piece {
			to := from + piece
			if to > length {
				to = length
			}
			_, err := file.Write(data[from:to])
			must(err)
		}
		must(file.Sync())
		must(file.Close())
		must(os.Rename(at("part"), at("whole")))
		show(fmt.Sprintf("written-%d", piece), at("whole"), data)
	}
	file, all := create(at("threads")), sync.WaitGroup{}
	for turn := 0; turn < 4; turn++ {
		all.Add(1)
		go func(turn int) {
			for n := turn; n < 32; n += 4 {
				write(file, data[n<<21:(n+1)<<21], int64(n)<<21)
			}
			all.Done()
		}(turn)
	}
	all.Wait()
	show("threads", at("threads"), data)
	seen, err := syscall.Mmap(int(file.Fd()), 0, length, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	must(err)
	expected := append([]byte{}, data...)
	for from := 0; from < length; from += 8 << 20 {
		copy(seen[from:], data[77:5077])
		copy(expected[from:], data[77:5077])
		write(file, data[:2<<20], int64(from)+3<<20)
		copy(expected[from+3<<20:], data[:2<<20])
	}
	fmt.Println("mapped", bytes.Equal(seen, expected))
	show("mapped-read", at("threads"), expected)
	write(create(at("other")), data, 0)
	must(os.Rename(at("other"), at("threads")))
	show("replaced", at("threads"), data)
	fmt.Println("replaced-mapped", bytes.Equal(seen, expected))
}

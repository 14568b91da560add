package cast

import (
	"fmt"
	"html"
	"strings"
	"time"
)

// The size of a cell and the margin, in units of the drawing. Most fonts with a fixed
// width have characters that are 0.6 times as wide as the font size.
const (
	cellWidth, cellHeight = 6, 13
	fontSize              = 10
	margin                = 8
	lastHold              = 4 * time.Second // how long the last picture is shown
)

// picture is a state of the screen: the IDs of its rows, and its cursor.
type picture struct {
	at     time.Duration
	rows   []int
	cx, cy int // cursor; cx is -1 if it is hidden
}

// drawing collects the rows of all pictures: most pictures differ in few rows.
type drawing struct {
	ids  map[string]int
	rows []string
}

// SVG draws the recording as an animation that repeats. Without support of animations the
// last picture is shown. The same recording gives the same text.
func (c *Cast) SVG() string {
	d := &drawing{ids: map[string]int{"": 0}, rows: []string{""}}
	pictures := d.pictures(c)
	w, h := c.Width*cellWidth+2*margin, c.Height*cellHeight+2*margin
	total := pictures[len(pictures)-1].at + lastHold
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" role="img">`+"\n<title>%s</title>\n", w, h, w*3/2, html.EscapeString(c.Title))
	fmt.Fprintf(&out, "<style>\ntext{white-space:pre}\n.s{transform:translateX(-%dpx);animation:s %.2fs step-end infinite}\n@keyframes s{", (len(pictures)-1)*w, total.Seconds())
	for i, p := range pictures {
		fmt.Fprintf(&out, "%.3f%%{transform:translateX(-%dpx)}", 100*p.at.Seconds()/total.Seconds(), i*w)
	}
	fmt.Fprintf(&out, "}\n@media(prefers-reduced-motion:reduce){.s{animation:none}}\n</style>\n<defs>\n")
	for id, row := range d.rows[1:] {
		fmt.Fprintf(&out, `<g id="r%d">%s</g>`+"\n", id+1, row)
	}
	fmt.Fprintf(&out, `</defs>`+"\n"+`<rect width="%d" height="%d" rx="6" fill="%s"/>`+"\n", w, h, background)
	fmt.Fprintf(&out, `<g class="s" font-family="ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace" font-size="%d" fill="%s">`+"\n", fontSize, foreground)
	for i, p := range pictures {
		fmt.Fprintf(&out, `<svg x="%d">`, i*w)
		if p.cx >= 0 {
			fmt.Fprintf(&out, `<rect x="%d" y="%d" width="%d" height="%d" opacity=".5"/>`, margin+p.cx*cellWidth, margin+p.cy*cellHeight, cellWidth, cellHeight)
		}
		for y, id := range p.rows {
			if id != 0 {
				fmt.Fprintf(&out, `<use href="#r%d" y="%d"/>`, id, margin+y*cellHeight)
			}
		}
		out.WriteString("</svg>\n")
	}
	out.WriteString("</g>\n</svg>\n")
	return out.String()
}

// pictures returns the states of the screen, without those that look like the one before.
func (d *drawing) pictures(c *Cast) []picture {
	s := NewScreen(c.Width, c.Height)
	defer s.Close()
	list := []picture{{rows: make([]int, c.Height), cx: -1}}
	for _, e := range c.Events {
		s.Write(e.Data)
		p := picture{at: e.At, cx: -1}
		if !s.term.CursorHidden() {
			p.cx, p.cy = s.term.CursorPosition().X, s.term.CursorPosition().Y
		}
		for y := range c.Height {
			p.rows = append(p.rows, d.row(s, y))
		}
		if last := list[len(list)-1]; fmt.Sprint(last.rows, last.cx, last.cy) != fmt.Sprint(p.rows, p.cx, p.cy) {
			list = append(list, p)
		}
	}
	return list
}

// row returns the ID of a row of the screen, 0 for an empty one.
func (d *drawing) row(s *Screen, y int) int {
	var out strings.Builder
	for x := 0; x < s.term.Width(); {
		begin := x
		_, style, _ := s.cell(x, y)
		l := lookOf(style)
		var text strings.Builder
		for x < s.term.Width() {
			content, style, width := s.cell(x, y)
			if lookOf(style) != l {
				break
			}
			text.WriteString(content)
			x += width
		}
		drawRun(&out, l, begin, x-begin, text.String())
	}
	id, ok := d.ids[out.String()]
	if !ok {
		id = len(d.rows)
		d.ids[out.String()] = id
		d.rows = append(d.rows, out.String())
	}
	return id
}

// drawRun draws cells that look alike.
func drawRun(out *strings.Builder, l look, x, cells int, text string) {
	left := margin + x*cellWidth
	if l.back != "" {
		fmt.Fprintf(out, `<rect x="%d" width="%d" height="%d" fill="%s"/>`, left, cells*cellWidth, cellHeight, l.back)
	}
	if strings.TrimSpace(text) == "" {
		return
	}
	trimmed := strings.TrimRight(text, " ")
	cells -= len(text) - len(trimmed)
	rest := strings.TrimLeft(trimmed, " ")
	skip := len(trimmed) - len(rest)
	fill := ""
	if l.fill != "" {
		fill = fmt.Sprintf(` fill="%s"`, l.fill)
	}
	fmt.Fprintf(out, `<text x="%d" y="%d" textLength="%d"%s%s>%s</text>`, left+skip*cellWidth, fontSize, (cells-skip)*cellWidth, fill, l.attributes, html.EscapeString(rest))
}
